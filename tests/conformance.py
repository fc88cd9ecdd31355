"""What every implementation of a protocol must do, whichever it is."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest

from kvray.errors import KVRayError, TransferError, TransportUnavailable
from kvray.store.arena import quotas
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Tables
from kvray.store.policy import Policy, Use
from kvray.transport import Transport
from kvray.transport.transport import Array
from tests.policy_life import BLOCK_BYTES, Life

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


def has_one_finite_rank_for_each_slot(make: MakePolicy) -> None:
    for seed in SEEDS:
        life = Life(make(64), seed=seed)
        for _ in life.steps(100):
            for slots in (life.ready(), life.ready()[::-2], life.ready()[:0]):
                ranks = life.policy.rank(slots, now=life.now)
                assert (ranks.dtype, ranks.shape) == (np.float64, slots.shape)
                assert np.isfinite(ranks).all()


def is_the_same_for_equal_lives_whatever_is_ranked_between(make: MakePolicy) -> None:
    life, other = Life(make(64), seed=7), Life(make(64), seed=7)
    for _ in life.steps(300):
        life.policy.rank(life.ready(), now=life.now)
    other.run(300)
    assert life.victims == other.victims
    assert len(life.victims) > 100
    one, two = (each.policy.rank(each.ready(), now=each.now) for each in (life, other))
    assert (one == two).all()


def spares_what_must_stay(make: MakePolicy) -> None:
    num_protected = num_leased = num_unready = 0
    for seed in SEEDS:
        life = Life(make(64), seed=seed)
        tables = life.tier.tables
        for victims in life.steps(150):
            assert len(np.unique(victims)) == len(victims)
            assert (tables.slot_state[victims] == READY).all()
            assert not tables.slot_leases[victims].any()
            assert not np.isin(life.protected, victims).any()
            num_protected += len(life.protected)
            num_leased += np.count_nonzero(tables.slot_leases)
            num_unready += np.count_nonzero(tables.slot_state) - len(life.ready())
    assert min(num_protected, num_leased, num_unready) > 100, "there was little to spare"


def lets_children_go_before_their_parents(make: MakePolicy) -> None:
    num_families = 0
    for seed in SEEDS:
        life = Life(make(64), seed=seed)
        for victims in life.steps(150):
            num_families += assert_leaves_first(life.tier.tables, victims)
    assert num_families > 50, "hardly a parent went"


def assert_leaves_first(tables: Tables, victims: Array) -> int:
    """Return how many parents were among them."""
    gone: set[int] = set()
    num_parents = 0
    for slot in victims.tolist():
        children = np.flatnonzero((tables.slot_parent == slot) & (tables.slot_state > 0))
        assert gone.issuperset(children.tolist())
        num_parents += len(children) > 0
        gone.add(slot)
    return num_parents


def lets_go_beyond_quotas_and_of_low_priority_first(make: MakePolicy) -> None:
    num_beyond = num_priorities = 0
    for seed in SEEDS:
        life = Life(make(64), seed=seed)
        life.run(120, with_others=False)
        tables, everything = life.tier.tables, life.ready()
        tables.slot_priority[everything] = tables.slot_key[everything, 1] % np.uint64(3) * 50
        roots = np.array([root_of(tables, slot) for slot in everything.tolist()])
        tables.slot_namespace[everything] = 1 + tables.slot_key[roots, 1] % np.uint64(2)
        mine = np.count_nonzero(tables.slot_namespace[everything] == 1)
        quotas.set_quotas(tables, {"01": mine // 2 * BLOCK_BYTES})
        victims = life.tier.next_to_go(48, protect=everything[:0], now=life.now)[:48]
        beyond = mine - mine // 2 if mine > 1 else 0
        assert (tables.slot_namespace[victims[:beyond]] == 1).all()
        first = victims[:beyond].tolist()
        priorities = [priority_of(tables, slot, []) for slot in first]
        priorities += [priority_of(tables, slot, first) for slot in victims[beyond:].tolist()]
        assert priorities[:beyond] == sorted(priorities[:beyond])
        assert priorities[beyond:] == sorted(priorities[beyond:])
        assert_leaves_first(tables, victims)
        num_beyond += beyond
        num_priorities += len(set(priorities[beyond:]))
    assert num_beyond > 20, "hardly anything was beyond its quota"
    assert num_priorities > len(SEEDS), "what went had one priority"


def root_of(tables: Tables, slot: int) -> int:
    while (parent := int(tables.slot_parent[slot])) >= 0:
        slot = parent
    return slot


def priority_of(tables: Tables, slot: int, gone: list[int]) -> int:
    """Return the highest priority of a block and those that hang from it, which it keeps."""
    below = np.flatnonzero((tables.slot_parent == slot) & (tables.slot_state == READY)).tolist()
    kept = [priority_of(tables, child, gone) for child in below if child not in gone]
    return max(int(tables.slot_priority[slot]), *kept, 0)


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
        going = life.ready()[np.argsort(host.rank(life.ready(), now=life.now), kind="stable")]
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
        assert (np.diff(host.rank(back, now=life.now)) >= 0).all()


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
    spares_what_must_stay,
    lets_children_go_before_their_parents,
    lets_go_beyond_quotas_and_of_low_priority_first,
    keeps_what_is_used_again_and_again,
    takes_the_order_over_into_another_tier_and_back,
    does_not_grow,
)


def check_policy(behaviour: Callable[[MakePolicy], None], make: MakePolicy) -> None:
    """Assert one of `POLICY_BEHAVIOURS` of policies that `make` makes of a number of slots."""
    assert behaviour in POLICY_BEHAVIOURS
    behaviour(make)
