"""Copies that are summed: the same checksums in one piece or many, by one thread or two."""

import os
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from kvray.store.arena import copier as copier_module
from kvray.store.arena.copier import Copier, Copy, copy_run
from kvray.store.arena.tables import Array


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


def noise(num_blocks: int, block_bytes: int) -> Array:
    size = num_blocks * block_bytes
    return np.frombuffer(np.random.default_rng(0).bytes(size), dtype=np.uint8).reshape(
        num_blocks, block_bytes
    )


def expected(blocks: Array, seeds: list[int]) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(block.tobytes(), seed)
        for block, seed in zip(blocks, seeds, strict=True)
    ]


@pytest.mark.parametrize("shared_bytes", [1, 2**40])
@pytest.mark.parametrize(
    ("num_blocks", "block_bytes"), [(0, 4096), (1, 1), (7, 4097), (300, 4096), (3, 1_100_000)]
)
def test_copies_have_their_bytes_and_their_checksums(
    copier: Copier,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    block_bytes: int,
    shared_bytes: int,
) -> None:
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", shared_bytes)
    source, seeds = noise(num_blocks, block_bytes), list(range(10, 10 + num_blocks))
    target = np.zeros_like(source)
    cut = num_blocks // 3
    copies = [Copy(cut, target[cut:], source[cut:]), Copy(0, target[:cut], source[:cut])]
    assert copier.copy_and_sum(copies, seeds).tolist() == expected(source, seeds)
    assert (target == source).all()


@pytest.mark.parametrize("shared_bytes", [0, 2**40])
@pytest.mark.parametrize("cuts", [(), (1,), (4, 5), (10, 200, 299)])
def test_plain_copies_are_whole_wherever_two_threads_part_them(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], shared_bytes: int
) -> None:
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", shared_bytes)
    source = noise(300, 5000)
    target = np.zeros_like(source)
    edges = [0, *cuts, 300]
    copier.copy([Copy(at, target[at:end], source[at:end]) for at, end in pairwise(edges)])
    assert (target == source).all()
    copier.copy([])


def test_plain_copies_are_made_when_the_second_thread_is_busy_or_gone(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", 1)
    source = noise(3, 4096)
    busy = threading.Event()
    waits = copier._second.submit(busy.wait, 30)
    target = np.zeros_like(source)
    copier.copy([Copy(0, target, source)])
    assert (target == source).all()
    busy.set()
    assert waits.result(30)
    copier.close()
    target[:] = 0
    copier.copy([Copy(0, target, source)])
    assert (target == source).all()


@pytest.mark.parametrize("whole_bytes", [0, 2**40])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("stride", [300_000, 300_001])
def test_run_is_copied_alike_in_pieces_and_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, whole_bytes: int, skipped: int, stride: int
) -> None:
    monkeypatch.setattr(copier_module, "_WHOLE_BYTES", whole_bytes)
    source = noise(5, stride)[:, :300_000]
    target = np.zeros(skipped + source.size, dtype=np.uint8)[skipped:].reshape(source.shape)
    copy_run(target, source)
    assert (target == source).all()


def test_closed_copier_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", 1)
    copier, source = Copier(), noise(4, 4096)
    target = np.zeros_like(source)
    copier.close()
    copier.close()
    assert copier.copy_and_sum([Copy(0, target, source)], [1, 2, 3, 4]).all()
    assert (target == source).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_waits_for_no_thread_of_its_parent(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", 1)
    source = noise(4, 4096)
    target = np.zeros_like(source)
    copier.copy_and_sum([Copy(0, target, source)], [1, 2, 3, 4])
    pid = os.fork()
    if pid == 0:
        copier.copy_and_sum([Copy(0, target, source)], [1, 2, 3, 4])
        copier.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
