"""The kernel that copies small pieces, in Triton's interpreter, and when it is used."""

import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvray.engine.device import gather as compiled
from kvray.engine.device.gather import MEMORY_BYTES, Below, calibrate, is_even, largest
from kvray.engine.device.pool import Pieces, join

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The module as it is where Triton runs kernels on the host."""
    spec: Any = importlib.util.spec_from_file_location("gather_interpreted", compiled.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, [8]), (3, [16384]), (130, [18432]), (70, [8, 8192, 8200, 24])],
    ids=["one word", "planes of heads", "latent pages", "mixed"],
)
def test_every_piece_lands_and_no_other_byte_is_touched(interpreted, count, sizes):
    each = np.resize(np.array(sizes), count)
    room = 20480
    source = np.random.default_rng(count).integers(1, 256, count * room, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    order = np.random.default_rng(1).permutation(count)
    for at, into, size in zip(range(count), order, each, strict=True):
        expected[into * room : into * room + size] = source[at * room : at * room + size]
    ends = target.ctypes.data + order * room, source.ctypes.data + np.arange(count) * room
    pieces = Pieces(*(column.astype(np.uint64) for column in (*ends, each)))
    assert is_even(pieces)
    interpreted.gather(pieces, CPU)
    assert (target == expected).all()


@pytest.mark.parametrize("column", range(3))
def test_addresses_and_sizes_must_be_whole_words(column):
    words = [np.array([8, 16], dtype=np.uint64) for _ in range(3)]
    assert is_even(Pieces(*words))
    words[column] = np.array([8, 20], dtype=np.uint64)
    assert not is_even(Pieces(*words))


def test_the_kernel_is_for_sizes_up_to_the_first_that_engines_copy_as_fast():
    assert largest([(4, 2.0, 1.0), (8, 2.0, 1.5), (16, 2.0, 1.9), (24, 9.0, 1.0)]) == 8
    assert largest([(4, 1.0, 1.0), (8, 2.0, 1.0)]) == 0
    assert largest([(4, 2.0, 1.0)]) == 4


def test_both_directions_are_measured_within_their_memory_and_piece_by_piece():
    host, device = 2**40, 2**41
    seen: dict[bool, list[int]] = {True: [], False: []}

    def by_engines(pieces: Pieces, is_load: bool) -> float:
        on_device, on_host = pieces[:2] if is_load else pieces[1::-1]
        for ends, base in ((on_device, device), (on_host, host)):
            assert ends.min() == base
            assert (ends + pieces.sizes).max() <= base + MEMORY_BYTES
        assert len(join(pieces, on_host, base=host, chunk_bytes=2**30).sizes) == len(pieces.sizes)
        seen[is_load].append(int(pieces.sizes[0]))
        return 20e-3 / int(pieces.sizes[0])

    def by_kernel(pieces: Pieces, is_load: bool) -> float:
        return 1e-6 if is_load else 2e-6

    assert calibrate(host, device, by_engines, by_kernel) == Below(16 * 1024, 8 * 1024)
    assert seen[True] == seen[False] == sorted(seen[True])
