"""A process of the bench: does kvray's and the bare work on the same bytes, also a tier's load."""

import hashlib
import mmap
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.random import default_rng

from kvray.config import format_size
from kvray.errors import KVRayError
from kvray.identity.block import BlockKey
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.runner import LOCK_WAIT_S, TOKENS_PER_BLOCK, Runner, reserve_all
from kvray.reference.child_process import Child, serve
from kvray.store import Arena
from kvray.store.arena.prefault import pieces_of, populate
from kvray.store.arena.tables import Array

PREFIX_BYTES = 32 * 2**20
"""Bytes of every prefix, whatever the size of its blocks: 256 blocks of 128 KiB."""

BUFFER_BYTES = 16 * PREFIX_BYTES
"""The pool, and as much shared memory for bare copies: more than a cache keeps."""

PREFIXES_PER_TURN = 2**17
"""Prefixes below have been stored before the load; each turn of a process has as many new ones."""

_ZIPF_EXPONENT = 1.0
_NEW_SHARE = 0.1
_DRAWN = 256

_Result = TypeVar("_Result")
_TIMEOUT_S = 900.0
_VOCABULARY = 128_000
_PATTERN_BYTES = 2**20


Found = list[tuple[str, float, float, float]]
"""What a process measured, call by call: its name, with the block's size as in "store 4MiB", then
the bytes, kvray's seconds, and those of the bare copy; calls that copy nothing have no bytes. Of
what is counted, such as "busy" calls and "hit" blocks, the number stands for the bytes."""


@lru_cache(maxsize=4096)
def block_keys(chain: int, num_blocks: int) -> list[BlockKey]:
    """Return the keys of a chain; chains of other numbers share none."""
    tokens = np.full(num_blocks * TOKENS_PER_BLOCK, chain)
    return chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)


class Load:
    """One process's requests to an arena, each beside a bare copy of as many bytes."""

    def __init__(self, arena: Arena, buffer: Array) -> None:
        """Begin with a prefaulted buffer of BUFFER_BYTES."""
        self._arena = arena
        sections = buffer[:BUFFER_BYTES].reshape(2, -1, PREFIX_BYTES)
        self._pool, self._shared = sections
        self._asks, self._turns = count(), count()
        self._place = 0
        self.found: Found = []

    def play(self, sizes: Sequence[int], *, num_prefixes: int, turn: int, seconds: float) -> None:
        """Ask for prefixes for so long, one in ten new; sizes take turns from hot to cold."""
        deadline, rng = time.monotonic() + seconds, default_rng(turn)
        weights = 1 / np.arange(1, num_prefixes + 1) ** _ZIPF_EXPONENT
        weights /= weights.sum()
        new = count(turn * PREFIXES_PER_TURN)
        while True:
            for drawn in rng.choice(num_prefixes, _DRAWN, p=weights).tolist():
                prefix = next(new) if rng.random() < _NEW_SHARE else drawn
                if time.monotonic() > deadline:
                    return
                self.ask(prefix, sizes[prefix % len(sizes)])

    def ask(self, prefix: int, size: int) -> None:
        """Lease a prefix and copy what is here; reserve, write and commit what is not."""
        arena, name = self._arena, format_size(size)
        keys = block_keys(prefix, PREFIX_BYTES // size)
        self._add("asked", len(keys))
        self._place = next(self._asks) % len(self._pool)
        pool = self._pool[self._place].reshape(-1, size)
        rows = np.arange(len(keys))
        leases, seconds = self._call(f"lease {name}", lambda: arena.lease(keys))
        if leases is None:
            self._add("busy", 1)
            return
        hit = leases[0].num_slots if leases else 0
        self._add("hit", hit)
        if hit:
            read = partial(arena.read, leases[0], pool, rows[:hit], verify=False)
            took, bare = self._beside(read, is_store=False, num_bytes=hit * size)
        if tail := keys[hit:]:
            self._store(tail, keys[hit - 1] if hit else None, pool[hit:], depth=hit)
        _, released = _with_time(lambda: arena.release(*leases, wait_s=LOCK_WAIT_S))
        if hit:
            self._add(f"retrieve {name}", hit * size, seconds + took + released, bare)

    def _store(
        self, keys: list[BlockKey], parent: BlockKey | None, pool: Array, *, depth: int
    ) -> None:
        arena, size = self._arena, pool.shape[1]
        name = format_size(size)
        place: Any = {"parent": parent, "depth": depth, "part": 0, "block_bytes": size}
        made, reserved = self._call(f"reserve {name}", lambda: arena.reserve(keys, **place))
        if made is None:
            self._add("busy", 1)
            return
        self._add("dropped", made.dropped)
        if not len(made.slots):
            return
        sums: list[Array] = []
        num_bytes = len(made.slots) * size
        written, bare = self._beside(
            lambda: sums.append(arena.write(made, pool, made.rows)),
            is_store=True,
            num_bytes=num_bytes,
        )
        _, committed = self._call(f"commit {name}", lambda: arena.commit(made, sums[0]))
        self._add(f"store {name}", num_bytes, reserved + written + committed, bare)

    def _beside(
        self, work: Callable[[], object], *, is_store: bool, num_bytes: int
    ) -> tuple[float, float]:
        """Return the seconds of `work` and of a bare copy; they take turns at going first."""
        place = self._place - len(self._pool) // 2  # in no cache
        source, target = self._pool[place, :num_bytes], self._shared[place, :num_bytes]
        if not is_store:
            source, target = target, source
        sides = [work, lambda: np.copyto(target, source)]
        order = -1 if next(self._turns) % 4 < 2 else 1  # a request may take two turns
        ours, bare = [_with_time(side)[1] for side in sides[::order]][::order]
        return ours, bare

    def _add(self, name: str, size: float, ours: float = 0.0, bare: float = 0.0) -> None:
        self.found.append((name, size, ours, bare))

    def _call(self, name: str, work: Callable[[], _Result]) -> tuple[_Result, float]:
        result, seconds = _with_time(work)
        self._add(name, 0, seconds)
        return result, seconds


def _with_time(work: Callable[[], _Result]) -> tuple[_Result, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


_SEED = request_seed(b"kvray bench")

Times = tuple[float, float, float]
"""(began, ended, CPU seconds) of timed work; all processes of the machine share the clock."""


def start(runner: Runner, module: str = __name__, env: Mapping[str, str] | None = None) -> Child:
    """Run `module`, which calls `serve`, until the run ends; `env` are more variables."""
    with runner.interrupts.held():
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closes with the run
        runner.stack.enter_context(log)
        advice = "It may have been short of memory: give a smaller --capacity."
        child = Child("A process of the bench", module, output=log, env=env, advice=advice)
        runner.stack.callback(child.close)
    return child


def call_all(
    workers: Sequence[Child],
    name: str,
    each: Iterable[Mapping[str, Any]] = repeat({}),
    /,
    **arguments: Any,
) -> list[Any]:
    """Have all `workers` answer the same call at once, `each` with arguments of its own.

    Return their answers; KVRayError: a call failed, or a process died.
    """
    for worker, own in zip(workers, each, strict=False):
        worker.send((name, {**arguments, **own}), timeout_s=_TIMEOUT_S)
    return [worker.receive(timeout_s=_TIMEOUT_S) for worker in workers]


class _Work:
    """The calls that a process answers: an arena, a buffer, and the work on them."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._buffer = np.empty(0, dtype=np.uint8)

    def attach(self, *, directory: str, lock_wait_s: float = LOCK_WAIT_S) -> None:
        """Map the arena in `directory` in place of the one before, as an engine's link does."""
        self.detach()
        self._arena = Arena.attach(Path(directory), label="bench", lock_wait_s=lock_wait_s)
        populate(*pieces_of(self._arena.tables))

    def detach(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def allocate(self, *, num_bytes: int) -> None:
        """Make the buffer and touch each page, as an engine's pinned memory is."""
        self._buffer = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
        pattern = np.frombuffer(default_rng(0).bytes(_PATTERN_BYTES), dtype=np.uint8)
        for at in range(0, num_bytes, _PATTERN_BYTES):
            self._buffer[at : at + _PATTERN_BYTES] = pattern[: num_bytes - at]

    def store(self, *, chain: int, shape: tuple[int, int], section: int) -> Times:
        """Store a section: that part of the buffer which has `shape`, blocks and bytes."""
        keys, pool = block_keys(chain, shape[0]), _cut(self._buffer, shape, section)
        rows, arena = np.arange(shape[0]), self.arena

        def work() -> bool:
            made = reserve_all(arena, keys, block_bytes=shape[1])
            return arena.commit(made, arena.write(made, pool, rows))

        return _timed(work)

    def retrieve(self, *, chain: int, shape: tuple[int, int], section: int, verify: bool) -> Times:
        keys, pool = block_keys(chain, shape[0]), _cut(self._buffer, shape, section)
        rows, arena = np.arange(shape[0]), self.arena

        def work() -> bool:
            leases = arena.lease(keys)
            if not leases or leases[0].num_slots < len(keys):
                return False
            arena.read(leases[0], pool, rows, verify=verify)
            return arena.release(*leases)

        return _timed(work)

    def copy(self, *, shape: tuple[int, int], section: int, is_store: bool) -> Times:
        """Copy bare, into the arena's memory, whose blocks are lost, or out of it."""
        source = _cut(self._buffer, shape, section).reshape(-1)
        target = _cut(self.arena.tables.data, shape, section).reshape(-1)
        if not is_store:
            source, target = target, source
        return _timed(lambda: np.copyto(target, source))

    def ask(self, *, prefixes: Sequence[int], sizes: Sequence[int]) -> Found:
        """Ask for each prefix once; the sizes of blocks take turns."""
        load = Load(self.arena, self._buffer)
        for prefix in prefixes:
            load.ask(prefix, sizes[prefix % len(sizes)])
        return load.found

    def play(self, *, sizes: Sequence[int], num_prefixes: int, turn: int, seconds: float) -> Found:
        load = Load(self.arena, self._buffer)
        load.play(sizes, num_prefixes=num_prefixes, turn=turn, seconds=seconds)
        return load.found

    def store_prompt(self, *, num_tokens: int, block_bytes: int) -> None:
        keys = chain_keys(_prompt(num_tokens), tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)
        made = reserve_all(self.arena, keys, block_bytes=block_bytes)
        pool = np.zeros((len(keys), block_bytes), dtype=np.uint8)
        self.arena.commit(made, self.arena.write(made, pool, np.arange(len(keys))))

    def look_up(self, *, num_tokens: int, present: int, count: int) -> list[tuple[float, float]]:
        """Look up a prompt of which the first `present` tokens are stored, and hash it bare.

        Return pairs of seconds, kvray's and the bare work's. kvray's side is all that an engine
        waits for, from the list of tokens to the lease, but not the lease's end.
        """
        tokens, arena = _prompt(num_tokens, present), self.arena
        pairs = []
        for _ in range(count):
            leases, seconds = _with_time(
                lambda: arena.lease(
                    chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=_SEED)
                )
            )
            arena.release(*leases or ())
            pairs.append((seconds, _with_time(lambda: _hash_bare(tokens))[1]))
            found = sum(lease.num_slots for lease in leases or ())
            expected = present // TOKENS_PER_BLOCK
            if leases is None or found != expected:
                raise KVRayError(
                    f"A lookup found {found} blocks instead of {expected}; run the bench again."
                )
        return pairs

    @property
    def arena(self) -> Arena:
        assert self._arena is not None
        return self._arena


def _hash_bare(tokens: Sequence[int]) -> bytes:
    """Pack a prompt and run sha256 over its chained blocks, which no lookup can do without."""
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    parent, step = _SEED, 4 * TOKENS_PER_BLOCK
    for at in range(0, len(packed), step):
        parent = hashlib.sha256(parent + packed[at : at + step]).digest()
    return parent


def _cut(memory: Array, shape: tuple[int, int], section: int) -> Array:
    num_bytes = shape[0] * shape[1]
    return memory[section * num_bytes : (section + 1) * num_bytes].reshape(shape)


def _prompt(num_tokens: int, present: int | None = None) -> list[int]:
    """Return a prompt, the same in every process; after `present` tokens it is another one."""
    rng = default_rng(num_tokens)
    tokens: list[int] = rng.integers(0, _VOCABULARY, num_tokens).tolist()
    if present is not None:
        others = default_rng(num_tokens + 1)
        tokens[present:] = others.integers(0, _VOCABULARY, num_tokens - present).tolist()
    return tokens


def _timed(work: Callable[[], bool | None]) -> Times:
    """Do `work` and time it; KVRayError: it did less than it should, and returned False."""
    cpu_s, began = time.process_time(), time.monotonic()
    is_done = work()
    ended, cpu_s = time.monotonic(), time.process_time() - cpu_s
    if is_done is False:
        raise KVRayError(
            "A step of the bench did not copy all of its blocks: the arena was busy or had no room;"
            " run it again, with a larger --capacity if it happens again."
        )
    return began, ended, cpu_s


if __name__ == "__main__":
    serve(_Work())
