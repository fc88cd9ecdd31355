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


def moves_a_run_of_blocks(couple: Couple) -> None:
    expect(couple, [(at * 65536, (at + 7) * 65536, 65536) for at in range(32)])


def moves_blocks_that_lie_anywhere(couple: Couple) -> None:
    places = np.random.default_rng(1).permutation(512)
    targets = np.random.default_rng(2).permutation(512)
    expect(
        couple, [(int(a) * 8192, int(b) * 8192, 8192) for a, b in zip(places, targets, strict=True)]
    )


def moves_blocks_that_are_in_a_row_at_one_end_only(couple: Couple) -> None:
    expect(couple, [(at * 4096, (63 - at) * 4096, 4096) for at in range(64)])
    expect(couple, [((63 - at) * 4096, at * 4096, 4096) for at in range(64)])


def moves_blocks_of_different_sizes(couple: Couple) -> None:
    expect(couple, [(0, 1 << 20, 3), (4096, 0, 5000), (1 << 20, 2 << 20, (1 << 20) + 1)])


def moves_all_of_the_memory(couple: Couple) -> None:
    expect(couple, [(0, 0, MEMORY_BYTES)])


def moves_an_empty_piece(couple: Couple) -> None:
    expect(couple, [])


def refuses_an_address_of_something_else(couple: Couple) -> None:
    none = np.zeros(1, dtype=np.int64)
    for garbage in (b"", b"garbage", couple.target.address[:12], couple.target.address[7:]):
        with pytest.raises(TransferError):
            couple.send(garbage, none, none, none + 4096, timeout_s=PATIENT_S)
    expect(couple, [(0, 0, 4096)])


def refuses_blocks_outside_of_the_sources_memory(couple: Couple) -> None:
    for at in (-4096, MEMORY_BYTES - 1):
        with pytest.raises(TransferError):
            carry(couple, [(at, 0, 4096)])
    expect(couple, [(0, 0, 4096)])


def refuses_blocks_outside_of_the_targets_memory(couple: Couple) -> None:
    for at in (-4096, MEMORY_BYTES - 1):
        with pytest.raises(TransferError):
            carry(couple, [(0, at, 4096)])
    expect(couple, [(0, 0, 4096)])


def goes_on_after_it_was_renewed(couple: Couple) -> None:
    before = couple.target.address
    couple.target.renew()
    assert couple.target.address != before
    expect(couple, [(0, 0, 4096)])


def writes_nothing_for_an_address_of_a_former_incarnation(couple: Couple) -> None:
    expect(couple, [(0, 0, 4096)])  # they are connected
    before = couple.target.address
    couple.target.renew()
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
    moves_a_run_of_blocks,
    moves_blocks_that_lie_anywhere,
    moves_blocks_that_are_in_a_row_at_one_end_only,
    moves_blocks_of_different_sizes,
    moves_all_of_the_memory,
    moves_an_empty_piece,
    refuses_an_address_of_something_else,
    refuses_blocks_outside_of_the_sources_memory,
    refuses_blocks_outside_of_the_targets_memory,
    goes_on_after_it_was_renewed,
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
