"""What every implementation of a protocol must do, whichever it is."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import pytest

from kvray.errors import KVRayError, TransferError, TransportUnavailable
from kvray.store.arena import eviction, lease, slots
from kvray.store.arena.layout import FREE, READY, Geometry
from kvray.store.arena.tables import Tables
from kvray.store.policy import Policy, Use
from kvray.transport import Transport
from kvray.transport.transport import Array

MEMORY_BYTES = 8 * 2**20
PATIENT_S = 20.0
FROZEN_S = 1.0


def pattern() -> Array:
    """Return what a source has in its memory: bytes that tell their place."""
    return np.random.default_rng(5).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)


class Couple(Protocol):
    """A source in another process, whose memory is `pattern`, and a target in this one."""

    memory: Array
    """The target's."""
    target: Transport
    pid: int
    """The source's process."""

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> Any:
        """Have the source send; raises what it raises, or ShardUnavailable when it is silent."""
        ...

    def kill(self) -> None:
        """End the source's process at once."""
        ...


def carry(
    couple: Couple, blocks: list[tuple[int, int, int]], *, timeout_s: float = PATIENT_S
) -> None:
    """Move blocks (source, target, size) as a mover does."""
    sources, targets, sizes = np.array(blocks, dtype=np.int64).reshape(-1, 3).T
    parcel = couple.send(couple.target.address, sources, targets, sizes, timeout_s=timeout_s)
    couple.target.receive(parcel, targets, sizes)


def expect(couple: Couple, blocks: list[tuple[int, int, int]]) -> None:
    """Carry blocks and assert that they, and nothing else, are where they should be."""
    couple.memory[:] = 0
    expected, content = np.zeros_like(couple.memory), pattern()
    for source, target, size in blocks:
        expected[target : target + size] = content[source : source + size]
    carry(couple, blocks)
    assert (couple.memory == expected).all()


def moves_what_it_is_given_and_nothing_else(couple: Couple) -> None:
    sources, targets = (np.random.default_rng(seed).permutation(512) * 8192 for seed in (1, 2))
    expect(couple, [(at * 65536, (at + 7) * 65536, 65536) for at in range(32)])  # a run
    expect(couple, [(int(a), int(b), 8192) for a, b in zip(sources, targets, strict=True)])
    expect(couple, [(at * 4096, (63 - at) * 4096, 4096) for at in range(64)])  # a run at one end
    expect(couple, [((63 - at) * 4096, at * 4096, 4096) for at in range(64)])
    expect(couple, [(0, 1 << 20, 3), (4096, 0, 5000), (1 << 20, 2 << 20, (1 << 20) + 1)])
    expect(couple, [(0, 0, MEMORY_BYTES)])
    expect(couple, [])


def refuses_an_address_of_something_else(couple: Couple) -> None:
    none = np.zeros(1, dtype=np.int64)
    for garbage in (b"", b"garbage", couple.target.address[:12], couple.target.address[7:]):
        with pytest.raises(TransferError):
            couple.send(garbage, none, none, none + 4096, timeout_s=PATIENT_S)
    expect(couple, [(0, 0, 4096)])


def refuses_blocks_outside_of_either_memory(couple: Couple) -> None:
    for at in (-4096, MEMORY_BYTES - 1):
        for block in ((at, 0, 4096), (0, at, 4096)):
            with pytest.raises(TransferError):
                carry(couple, [block])
    expect(couple, [(0, 0, 4096)])


def writes_nothing_for_an_address_of_a_former_incarnation(couple: Couple) -> None:
    expect(couple, [(0, 0, 4096)])  # they are connected
    before = couple.target.address
    couple.target.renew()
    assert couple.target.address != before
    couple.memory[:] = 0
    block = np.zeros(1, dtype=np.int64)
    with contextlib.suppress(KVRayError):
        couple.send(before, block, block, block + 4096, timeout_s=FROZEN_S)
    assert not couple.memory.any()
    expect(couple, [(0, 0, 4096)])


def tells_of_a_dead_source(couple: Couple) -> None:
    couple.kill()
    with pytest.raises(KVRayError):
        carry(couple, [(0, 0, 4096)])


def ends_by_its_deadline_with_a_frozen_source(couple: Couple) -> None:
    expect(couple, [(0, 0, 4096)])
    os.kill(couple.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(KVRayError):
            carry(couple, [(0, 0, MEMORY_BYTES)], timeout_s=FROZEN_S)
        assert time.monotonic() - began < FROZEN_S + 10
    finally:
        os.kill(couple.pid, signal.SIGCONT)


def writes_nothing_late_once_it_was_renewed(couple: Couple) -> None:
    os.kill(couple.pid, signal.SIGSTOP)
    try:
        with pytest.raises(KVRayError):
            carry(couple, [(0, 0, MEMORY_BYTES)], timeout_s=FROZEN_S)
        couple.target.renew()
        couple.memory[:] = 0
    finally:
        os.kill(couple.pid, signal.SIGCONT)
    time.sleep(FROZEN_S)
    assert not couple.memory.any()


def can_be_closed_twice(couple: Couple) -> None:
    couple.target.close()
    couple.target.close()
    with pytest.raises(TransportUnavailable):
        _ = couple.target.address


TRANSPORT_BEHAVIOURS = (
    moves_what_it_is_given_and_nothing_else,
    refuses_an_address_of_something_else,
    refuses_blocks_outside_of_either_memory,
    writes_nothing_for_an_address_of_a_former_incarnation,
    tells_of_a_dead_source,
    ends_by_its_deadline_with_a_frozen_source,
    writes_nothing_late_once_it_was_renewed,
    can_be_closed_twice,
)


def check_transport(behaviour: Callable[[Couple], None], couple: Couple) -> None:
    """Assert one of `TRANSPORT_BEHAVIOURS` of a new couple."""
    assert behaviour in TRANSPORT_BEHAVIOURS
    behaviour(couple)


# -- policies -----------------------------------------------------------------------------------

MakePolicy = Callable[[int], Policy]
SEEDS = range(4)
BLOCK_BYTES = 4096
PROMPT_MAX = 12
FORKS = 3


class Life:
    """Real tables under a policy: prompts of a forest come, grow, and come again.

    Equal seeds are equal lives.
    """

    def __init__(self, policy: Policy, *, num_blocks: int = 64, seed: int = 0) -> None:
        capacity = num_blocks * BLOCK_BYTES
        geometry = Geometry(
            capacity=capacity, slab_bytes=capacity, slot_min=BLOCK_BYTES, holders_max=1
        )
        self.tables = Tables(bytearray(geometry.table_bytes), geometry, has_data=False)
        self.policy = policy
        self.now = 0.0
        self.victims: list[int] = []
        """All that ever went, in order."""
        self._rng = random.Random(seed)
        self._paths: list[tuple[int, ...]] = []

    def ready(self) -> Array:
        """Return the slots that have blocks."""
        return np.flatnonzero(self.tables.slot_state == READY)

    def rank(self, some: Array) -> Array:
        return self.policy.rank(some, now=self.now)

    def run(self, count: int) -> None:
        """Make requests; the policy hears what each found, and what took the place of what."""
        for _ in range(count):
            self.now += self._rng.expovariate(0.2)
            path = self._next_path()
            self._request(np.stack([key_of(path[: end + 1]) for end in range(len(path))]))

    def _request(self, keys: Array) -> None:
        names = np.ascontiguousarray(keys[:, 0]).view(np.int64)
        tables, asked = self.tables, lease.PartRequest(0)
        found = lease.match(tables, keys, [asked])[1][asked]
        first, length = len(found), len(keys)
        tables.slot_tick[found] = tables.next_tick()
        if first:
            self.policy.used(Use(found, names[:first], 0, length, self.now))
        if first == length:
            return
        short = length - first - int(np.count_nonzero(tables.slot_state == FREE))
        within = np.arange(tables.geometry.num_slots)
        victims = eviction.choose_victims(
            tables, max(0, short), within=within, protect=found, rank=self.rank
        )
        self.victims += victims.tolist()
        slots.evict(tables, victims)
        made = slots.reserve(
            tables,
            keys[first:],
            parent=keys[first - 1 : first] if first else None,
            depth=first,
            part=0,
            block_bytes=BLOCK_BYTES,
            holder=0,
            candidates=slots.Candidates(),
        )
        assert made is not None
        slots.commit(tables, made, np.zeros(len(made.slots), dtype="<u8"))
        rows, before = first + made.rows, int(found[-1]) if first else -1
        self.policy.stored(Use(made.slots, names[rows], int(rows[0]), length, self.now, before))

    def _next_path(self) -> tuple[int, ...]:
        """Return a prompt that goes on with another one, or shares its head, or is new."""
        rng = self._rng
        kind = rng.random()
        if not self._paths or kind < 0.3:
            path: tuple[int, ...] = (rng.randrange(10**9),)
        else:
            before = self._paths[-1 - min(int(rng.expovariate(0.1)), len(self._paths) - 1)]
            path = before if kind < 0.8 else before[: rng.randrange(len(before)) + 1]
        while len(path) < PROMPT_MAX and rng.random() < 0.7:
            path += (rng.randrange(FORKS),)
        self._paths = [*self._paths[-100:], path]
        return path


@lru_cache(maxsize=5000)
def key_of(head: tuple[int, ...]) -> Array:
    """Return the key of a prompt's head, the same one at any time."""
    words = random.Random(repr(head))
    return np.array([words.getrandbits(64) for _ in range(4)], dtype="<u8")


def has_one_finite_rank_for_each_slot(make: MakePolicy) -> None:
    for seed in SEEDS:
        life = Life(make(64), seed=seed)
        for _ in range(100):
            life.run(1)
            for some in (life.ready(), life.ready()[::-2], life.ready()[:0]):
                ranks = life.rank(some)
                assert (ranks.dtype, ranks.shape) == (np.dtype(float), some.shape)
                assert np.isfinite(ranks).all()


def is_the_same_for_equal_lives_whatever_is_ranked_between(make: MakePolicy) -> None:
    life, other = Life(make(64), seed=7), Life(make(64), seed=7)
    for _ in range(300):
        life.run(1)
        life.rank(life.ready())
    other.run(300)
    assert life.victims == other.victims
    assert len(life.victims) > 100
    assert (life.rank(life.ready()) == other.rank(other.ready())).all()


def keeps_what_is_used_again_and_again(make: MakePolicy) -> None:
    policy = make(40)
    hot, names = np.arange(10), np.arange(40)
    for slot in range(40):
        policy.stored(Use(names[slot : slot + 1], names[slot : slot + 1], 0, 1, float(slot)))
    next_name, now = 40, 40.0
    for turn in range(60):
        for slot in hot.tolist():
            now += 1.0
            policy.used(Use(hot[slot : slot + 1], names[slot : slot + 1], 0, 1, now))
        for _ in range(10 if turn > 1 else 0):
            now += 1.0
            ranks = policy.rank(np.arange(40), now=now)
            gone = np.array([ranks.argmin()])
            assert gone[0] not in hot
            policy.stored(Use(gone, np.array([next_name]), 0, 1, now))
            next_name += 1


def takes_the_order_over_into_another_tier_and_back(make: MakePolicy) -> None:
    for seed in SEEDS:
        life = Life(make(128), num_blocks=64, seed=seed)
        life.run(150)
        host = life.policy
        going = life.ready()[np.argsort(life.rank(life.ready()), kind="stable")]
        below = host.beside(200)
        copies = np.random.default_rng(seed).permutation(200)[: len(going)]
        for copy, slot in zip(copies, going, strict=True):
            below.copied(np.array([copy]), host, np.array([slot]))
        ranks = below.rank(copies, now=life.now)
        assert (np.diff(ranks) >= 0).all()
        assert ranks[0] < ranks[-1]
        back = np.arange(64, 64 + len(going))
        for copy, slot in zip(copies, back, strict=True):
            host.copied(np.array([slot]), below, np.array([copy]))
        assert (np.diff(life.rank(back)) >= 0).all()


def does_not_grow(make: MakePolicy) -> None:
    """Whoever calls this has seen to it that it remembers hundreds of prompts, not thousands."""
    life = Life(make(64))
    life.run(1000)
    before = num_held(life.policy)
    life.run(1000)
    assert num_held(life.policy) < 1.1 * before


def num_held(thing: Any) -> int:
    """Return how many things something holds in its attributes and what hangs from them."""
    if isinstance(thing, np.ndarray):
        return int(thing.size)
    if isinstance(thing, dict):
        return len(thing) + sum(map(num_held, thing.values()))
    if isinstance(thing, list | tuple | set):
        return len(thing) + sum(map(num_held, thing))
    return sum(map(num_held, vars(thing).values())) if hasattr(thing, "__dict__") else 1


POLICY_BEHAVIOURS = (
    has_one_finite_rank_for_each_slot,
    is_the_same_for_equal_lives_whatever_is_ranked_between,
    keeps_what_is_used_again_and_again,
    takes_the_order_over_into_another_tier_and_back,
    does_not_grow,
)


def check_policy(behaviour: Callable[[MakePolicy], None], make: MakePolicy) -> None:
    """Assert one of `POLICY_BEHAVIOURS` of policies that `make` makes of a number of slots."""
    assert behaviour in POLICY_BEHAVIOURS
    behaviour(make)
