"""The tensor cache: stores and retrieves KV tensors by their tokens, in this node's arena."""

import contextlib
import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch

from kvray.config import KVRayConfig, cache_dir, load_config
from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity.block import namespace_id
from kvray.identity.fingerprint import fingerprint_model
from kvray.identity.keys import request_seed
from kvray.node import Registration, attach
from kvray.store.arena.tables import Array
from kvray.store.machine.access import Access
from kvray.tensor_cache import layout
from kvray.tensor_cache.blocks import ArenaBlocks, Source
from kvray.tensor_cache.layout import (
    KV,
    Heads,
    Mask,
    MaskedPrompt,
    TensorMetadata,
    Tokens,
    read_prompt,
)
from kvray.trace.arrival import Arrivals, runs_between
from kvray.trace.reasons import MISS_PREFIX

_log = logging.getLogger("kvray.tensor_cache")

_CLOSE_S = 30.0
_FLUSH_S = 60.0
_PREFETCH_S = 10.0
_STEP_BYTES = 16 * 2**20
"""Bytes converted at a time: bounds the memory that it takes."""
_WAITING_BYTES_MAX = 2**30
"""Copies of tensors that may wait for the background."""

_instances: dict[str, "TensorCache"] = {}
_reported: set[tuple[Path, int, str]] = set()
"""The tier, rank and name under which each cache of this process reports."""
# Held while a cache is made, so that two threads that ask for one id get one cache, and while one
# chooses its name.
_making = threading.RLock()


def _forget_instances() -> None:
    """Forget the parent's caches after a fork: their threads are not here."""
    global _making
    _making = threading.RLock()
    _instances.clear()
    _reported.clear()


os.register_at_fork(after_in_child=_forget_instances)


class TensorCache:
    """KV tensors in the node's tier, found by their tokens; all methods from any thread.

    Only full blocks of `metadata.tokens_per_block` tokens are stored and found. Blocks on the
    node's disk or on other nodes are staged when a call asks for them. The call waits for that for
    `connector.stage_wait_s` at most; later blocks are there for a later call. Without a tier
    nothing is stored and nothing found, and the log says so once. The cache uses the tier when it
    appears or comes back. A tensor may be on any device; retrieved tensors are on the CPU.

    A method that takes tokens, shape [num_tokens], raises ConfigError if it cannot read them or
    their mask, and once the cache is closed.

    Source: the contract of LMCache's LMCacheEngine and LMCacheEngineBuilder.
    """

    def __init__(self, config: KVRayConfig | None, metadata: TensorMetadata) -> None:
        """Make a cache; `close` it, or use it with `with`.

        Args:
            config: of the tier; None: the configuration that `load_config` finds.
            metadata: the model and the shape of its tensors.

        Raises:
            ConfigError: no configuration, arguments of another kind, or `metadata.model` is a path
                without a checkpoint.
        """
        self.config = _checked(config, metadata)
        self.metadata = metadata
        fingerprint, weights = _fingerprint(metadata.model), self.config.connector.weights_version
        self.namespace = replace(metadata.namespace(fingerprint=fingerprint), weights=weights or "")
        self._seed: bytes | None = request_seed(self.namespace.digest(), salt=metadata.salt)
        """Of all keys; None while the weights have no name."""
        self._lock = threading.Lock()
        """Guards the counts, the users and the end."""
        self._counted: Counter[str] = Counter()
        self._pid, began_at = os.getpid(), time.monotonic()
        # The calls under way, and the cache itself until it is closed: their blocks stay leased or
        # reserved while they copy, so only the last one may let go of the arena.
        self._users = 1
        self._closed, self._has_left = False, threading.Event()
        connector = self.config.connector
        self._stores = StoreQueue(saves_max=connector.saves_max, bytes_max=_WAITING_BYTES_MAX)
        name = connector.replica or f"{platform.node()}-{os.getpid()}"
        with _making:
            names = chain([name], (f"{name}.{number}" for number in count(2)))
            places = ((self.config.node_dir, metadata.rank, one) for one in names)
            self._place = next(place for place in places if place not in _reported)
            _reported.add(self._place)
        self._link = attach(
            self.config.node_dir,
            label=f"tensors {self._place[2]} rank {metadata.rank}",
            lock_wait_s=self.config.arena.lock_wait_s,
            attach_retry_s=connector.attach_retry_s,
            access=Access.of(self.config.arena.group),
        )
        self._registration = Registration(
            replica=self._place[2],
            rank=metadata.rank,
            namespace=self.namespace,
            counters=lambda: self.counters() | {"uptime_s": int(time.monotonic() - began_at)},
            name_weights=self.set_weights_version,
        )
        self._blocks = ArenaBlocks(
            self._link,
            self._registration,
            block_bytes=metadata.block_bytes,
            blocks_per_step=max(1, _STEP_BYTES // metadata.block_bytes),
            verify=connector.verify_on_load != "never",
            namespace=namespace_id(self.namespace.digest()),
        )
        self._link.register(self._registration)

    # -- by instance id -----------------------------------------------------------------------

    @classmethod
    def get_or_create(
        cls, instance_id: str, config: KVRayConfig | None, metadata: TensorMetadata
    ) -> "TensorCache":
        """Return this process's cache of that id, made if there is none.

        Raises:
            ConfigError: it exists with another configuration or other metadata.
        """
        settings = _checked(config, metadata)
        with _making:
            found = cls.get(instance_id)
            if found is None:
                found = _instances[instance_id] = cls(settings, metadata)
        names = (field.name for field in fields(metadata))
        different = [n for n in names if getattr(found.metadata, n) != getattr(metadata, n)]
        if found.config != settings:
            different.append("the configuration")
        if different:
            raise ConfigError(
                f"The TensorCache {instance_id!r} exists with other values of"
                f" {', '.join(different)}; destroy it first, or choose another instance id."
            )
        return found

    @classmethod
    def get(cls, instance_id: str) -> "TensorCache | None":
        """Return this process's cache of that id; None if there is none or it is closed."""
        found = _instances.get(instance_id)
        return None if found is None or found.closed else found

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close this process's cache of that id and forget it; nothing happens without one."""
        with _making:
            found = _instances.pop(instance_id, None)
        if found is not None:
            found.close()

    # -- storing and retrieving ---------------------------------------------------------------

    def store(
        self,
        tokens: Tokens,
        kv: KV,
        mask: Mask | None = None,
        skip_existing: bool = True,
        blocking: bool = True,
    ) -> int:
        """Store the KV of the full blocks of `tokens`.

        Args:
            tokens: token ids, shape [num_tokens].
            kv: a (keys, values) pair of tensors for each layer, or one tensor
                [num_layers, 2, ...], in the layout and dtype of the metadata and without a batch
                dimension; only of the tokens that `mask` does not leave out. Not kept: it may be
                changed as soon as this returns.
            mask: booleans, shape [num_tokens], False for leading tokens whose KV is not in `kv`.
                Their number is a multiple of tokens_per_block. If their blocks are not in the
                tier nothing is stored, for it could not be found.
            skip_existing: False: read the blocks that are there and replace those that are
                damaged. Equal tokens have equal KV, so valid blocks are never written again.
            blocking: False: take a copy and store it in the background; if too much is waiting
                there, it is dropped and counted. `flush` or `close` waits for it.

        Returns:
            Tokens that were newly stored; 0 with blocking=False.

        Raises:
            LayoutMismatch: the tensors are not what the metadata says.
        """
        prompt = self._read_prompt(tokens, mask)
        heads = layout.heads_of(kv, self.metadata)
        expected = prompt.num_tokens - prompt.num_masked
        if heads[0].shape[1] != expected:
            raise LayoutMismatch(
                f"The KV is of {heads[0].shape[1]} tokens where tokens and mask ask for"
                f" {expected}; give the KV of exactly the tokens that the mask does not leave out."
            )
        with self._using():
            if not blocking:
                self._store_later(prompt, heads, renew=not skip_existing)
                return 0

            def pack(blocks: Array) -> tuple[Array, Array]:
                return layout.pack(heads, blocks, self.metadata), np.arange(len(blocks))

            return self._store(prompt, pack, renew=not skip_existing)

    def retrieve(
        self, tokens: Tokens, mask: Mask | None = None, return_tuple: bool = True
    ) -> tuple[KV, torch.Tensor]:
        """Return the stored KV of the longest run of leading blocks.

        Args:
            tokens: token ids, shape [num_tokens].
            mask: booleans, shape [num_tokens], False for leading tokens whose KV is left out
                (it must be in the tier all the same). Their number is a multiple of
                tokens_per_block.
            return_tuple: False: one tensor [num_layers, 2, ...] instead of a pair for each layer.

        Returns:
            (kv, ret_mask). ret_mask, a bool tensor of shape [num_tokens], is True for the tokens
            that were found. kv holds exactly those, in the layout of the metadata, as CPU tensors
            of the caller's own; () if none was found. A damaged block ends the run.
        """
        prompt = self._read_prompt(tokens, mask)
        with self._using():
            _, arrivals, reason = self._blocks.find(
                prompt.keys, wait_s=self.config.connector.stage_wait_s
            )
            found, blob = self._load(prompt)
        self._count_request(prompt, found, arrivals, reason)
        ret_mask = torch.zeros(prompt.num_tokens, dtype=torch.bool, device="cpu")
        ret_mask[prompt.num_masked : prompt.num_masked + found] = True
        if not found:
            return (), ret_mask
        pairs = tuple((layer[0], layer[1]) for layer in blob)
        return (pairs if return_tuple else blob), ret_mask

    def lookup(self, tokens: Tokens) -> int:
        """Return how many leading tokens can be retrieved now, a multiple of tokens_per_block.

        They are neither held nor read: `retrieve` may find fewer.
        """
        return self.prefetch(tokens, timeout_s=self.config.connector.stage_wait_s)

    def prefetch(self, tokens: Tokens, timeout_s: float = _PREFETCH_S) -> int:
        """Stage blocks from the node's disk and other nodes, and return as `lookup`.

        Args:
            tokens: token ids, shape [num_tokens].
            timeout_s: how long to wait for it; `staging.deadline_s` bounds it, too.
        """
        prompt = self._read_prompt(tokens, None)
        with self._using():
            here, _, _ = self._blocks.find(prompt.keys, wait_s=timeout_s)
            return here * self.metadata.tokens_per_block

    def set_weights_version(self, version: str | None) -> None:
        """Name the weights that all KV from now on is computed with.

        Nothing that was stored under another version is found from now on. A call that has begun
        goes by the version before. `Client.set_weights_version` does the same from elsewhere.

        Args:
            version: what equal weights are called everywhere; None: they are being replaced, so
                nothing is stored or found until there is a version again.
        """
        metadata = self.metadata
        named = self.namespace if version is None else replace(self.namespace, weights=version)
        digest, self.namespace = named.digest(), named
        self._blocks.namespace = namespace_id(digest)
        self._seed = None if version is None else request_seed(digest, salt=metadata.salt)
        self._registration.namespace = named.named(named.model, version)

    def counters(self) -> dict[str, int]:
        """Return totals since this cache was made, as `kvray status` shows them.

        A call of `retrieve` is a request, and what its mask leaves out are tokens of the caller's
        own. Hits are counted by where they came from, misses by reason.
        """
        with self._locked():
            return dict(self._counted)

    # -- its life -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether no call may begin: closed, or this is a forked child of its process."""
        return self._closed or os.getpid() != self._pid

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait for the stores with blocking=False; False: not done within `timeout_s`, or ever."""
        return os.getpid() == self._pid and self._stores.flush(timeout_s)

    def close(self) -> None:
        """Finish what is under way, within a deadline, and leave the tier. Twice is fine."""
        with self._locked():
            if self.closed:
                return
            self._closed = True
        deadline = time.monotonic() + _CLOSE_S
        given_up = self._stores.close(_CLOSE_S)
        if given_up:
            _log.warning("kvray: %d stores were given up at close", given_up)
        self._let_go()
        if not self._has_left.wait(max(0.0, deadline - time.monotonic())):
            _log.warning("kvray: calls are still under way after close")

    def __enter__(self) -> "TensorCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the arena for a call; ConfigError: the cache is closed."""
        with self._locked():
            if self.closed:
                raise ConfigError(
                    "This TensorCache is closed (or belongs to the parent of this forked process);"
                    " make a new one."
                )
            self._users += 1
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """End one use; the last one leaves the tier."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._blocks.close()
        self._link.unregister(self._registration)
        self._link.detach()
        _reported.discard(self._place)
        self._has_left.set()

    def _locked(self) -> contextlib.AbstractContextManager[object]:
        """Hold the lock; a forked child does not, as the thread that has it may not be there."""
        return self._lock if os.getpid() == self._pid else contextlib.nullcontext()

    # -- inside -------------------------------------------------------------------------------

    def _read_prompt(self, tokens: Tokens, mask: Mask | None) -> MaskedPrompt:
        size = self.metadata.tokens_per_block
        return read_prompt(tokens, mask, tokens_per_block=size, seed=self._seed)

    def _store(self, prompt: MaskedPrompt, source: Source, *, renew: bool) -> int:
        """Store the blocks of the suffix; return the tokens that were new."""
        size = self.metadata.tokens_per_block
        if prompt.first:  # without those before it, nothing of the suffix could be found
            self._blocks.find(
                prompt.keys[: prompt.first], wait_s=self.config.connector.stage_wait_s
            )
        stored, existing = self._blocks.write(prompt.keys, prompt.first, source, renew=renew)
        dropped = prompt.num_blocks - stored - existing
        self._count(stored_tokens=stored * size, dropped_tokens=dropped * size)
        return stored * size

    def _store_later(self, prompt: MaskedPrompt, heads: Heads, *, renew: bool) -> None:
        """Copy the blocks that are missing and queue them for the background."""
        here = 0 if renew else max(0, self._blocks.count(prompt.keys) - prompt.first)
        missing = np.arange(here, prompt.num_blocks)
        size = len(missing) * self.metadata.block_bytes
        has_arena = self._link.arena is not None
        if has_arena and len(missing) and self._stores.has_room(size):
            copy = layout.pack(heads, missing, self.metadata)
            later = replace(prompt, first=prompt.first + here)

            def store() -> None:
                self._store(later, lambda blocks: (copy, blocks), renew=renew)

            if self._stores.submit(size, store):
                return
        self._count(dropped_tokens=len(missing) * self.metadata.tokens_per_block)
        if has_arena and len(missing):
            self._blocks.say_once(
                "saves", "KV was not stored: too many stores wait for the background (said once)"
            )

    def _load(self, prompt: MaskedPrompt) -> tuple[int, torch.Tensor]:
        """Return how many tokens of the suffix are here and valid, and their KV as one tensor."""
        metadata, num_valid = self.metadata, 0
        with self._blocks.leased(prompt.keys) as held:
            found = 0 if held is None else max(0, held[1].num_slots - prompt.first)
            blob = layout.empty_blob(found * metadata.tokens_per_block, metadata)
            heads = layout.heads_of(blob, metadata)
            for start, rows in () if held is None else self._blocks.read(held, prompt.first):
                layout.unpack(rows, heads, start, metadata)
                num_valid = (start + len(rows)) * metadata.tokens_per_block
        return num_valid, layout.cut(blob, num_valid, metadata)

    def _count(self, **tokens: int) -> None:
        with self._lock:
            self._counted.update(tokens)

    def _count_request(
        self, prompt: MaskedPrompt, found: int, arrivals: Arrivals, reason: str
    ) -> None:
        """Count a `retrieve`, as a connector counts a request.

        So many tokens were `found`, in blocks that came by `arrivals`; `reason` is why not more.
        """
        block = self.metadata.tokens_per_block
        counts = Counter(
            requests=1,
            prompt_tokens=prompt.num_tokens,
            local_tokens=prompt.num_masked,
            hit_tokens=found,
        )
        end = prompt.first + found // block
        for start, stop, way, _ in runs_between(arrivals, prompt.first, end):
            counts[f"hit_tokens_from_{way}"] += (stop - start) * block
        if self._seed is None:
            reason = "weights_unnamed"
        if missed := (prompt.num_tokens - prompt.num_masked) // block * block - found:
            # If all was here, a block was damaged since, or has just been evicted.
            counts[f"{MISS_PREFIX}{'not_stored' if reason == 'none' else reason}"] += missed
        self._count(**counts)


class StoreQueue:
    """Does one action after the other in the background; any thread may call any method.

    It holds at most `saves_max` actions of `bytes_max` bytes; a single one may have any size. What
    crosses to its thread: closures that own all they touch.
    """

    def __init__(self, *, saves_max: int, bytes_max: int) -> None:
        self._saves_max = saves_max
        self._bytes_max = bytes_max
        self._executor = ThreadPoolExecutor(1, "kvray-saver")
        self._lock = threading.RLock()
        self._sizes: dict[Future[None], int] = {}
        self._closed = False

    def has_room(self, size: int) -> bool:
        """Return whether `submit` would take `size` bytes now."""
        with self._lock:
            self._sizes = {one: size for one, size in self._sizes.items() if not one.done()}
            num_waiting = sum(not one.running() for one in self._sizes)
            used = sum(self._sizes.values())
            has_bytes = used == 0 or used + size <= self._bytes_max
            return not self._closed and num_waiting < self._saves_max and has_bytes

    def submit(self, size: int, action: Callable[[], None]) -> bool:
        """Do `action`, which keeps `size` bytes, soon; False: too much is waiting already."""
        with self._lock:
            if not self.has_room(size):
                return False
            self._sizes[self._executor.submit(_run, action)] = size
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or under way; False: not within `timeout_s`."""
        with self._lock:
            pending = list(self._sizes)
        return not wait(pending, timeout_s).not_done

    def close(self, timeout_s: float) -> int:
        """Do what is waiting and end the thread; return how much was given up for lack of time.

        An action that is under way at the deadline goes on.
        """
        with self._lock:
            self._closed = True
        self.flush(timeout_s)
        given_up = sum(one.cancel() for one in self._sizes)
        self._executor.shutdown(wait=self.flush(0))
        return given_up


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - a defect; what waits is stored all the same
        _log.exception("kvray: a defect while KV was stored in the background")


def _fingerprint(model: str) -> str | None:
    """Return the fingerprint of the checkpoint at the path `model`; None if it is a name."""
    if not Path(model).exists() and not model.startswith(("/", "./", "../", "~")):
        return None
    return fingerprint_model(Path(model).expanduser(), cache_dir=cache_dir() / "fingerprints")


def _checked(config: object, metadata: object) -> KVRayConfig:
    """Return `config`, or the one that `load_config` finds; ConfigError for other types."""
    if not isinstance(metadata, TensorMetadata):
        kind = type(metadata).__name__
        raise ConfigError(f"metadata must be a kvray.TensorMetadata, not a {kind}.")
    if config is not None and not isinstance(config, KVRayConfig):
        raise ConfigError(
            "config must be what kvray.load_config(path) returns, or None for what it"
            f" finds, not a {type(config).__name__}."
        )
    return config or load_config()
