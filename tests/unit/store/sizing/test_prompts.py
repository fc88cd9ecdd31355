"""Prompts on the wire."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.store.sizing import SampledPrompts
from kvray.store.sizing.prompts import sampled_lengths
from tests.unit.store.sizing.prompts import sampled


def random_paths(seed: int, count: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**64, rng.integers(0, 9), dtype="u8") for _ in range(count)]


def test_what_was_packed_comes_out() -> None:
    prompts = sampled(random_paths(1), limit=2**63, answers=0)
    found = SampledPrompts.unpack(prompts.pack())
    assert (found.limit, found.num_blocks) == (prompts.limit, prompts.num_blocks)
    for name in ("ages", "lengths", "keys"):
        assert getattr(found, name).tolist() == getattr(prompts, name).tolist()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_sample_are_refused(packed: bytes) -> None:
    with pytest.raises(ConfigError):
        SampledPrompts.unpack(packed)


@pytest.mark.parametrize(
    "change",
    [
        {0: -1},
        {0: 2**70},
        {0: 5},  # keys above the limit
        {1: -1},
        {2: "many"},
        {5: np.array([np.nan] * 9, "<f4").tobytes()},
        {6: b"123"},
        {6: np.array([[2, 3, 0]] * 9, "<u4").tobytes()},
        {7: b""},
        {7: None},
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(change: dict[int, object]) -> None:
    path = np.array([7, 2**50], "u8")
    fields = list(msgpack.unpackb(sampled([path] * 9).pack()))
    for at, value in change.items():
        fields[at] = value
    try:
        packed = msgpack.packb(fields)
    except OverflowError:
        packed = b""
    with pytest.raises(ConfigError):
        SampledPrompts.unpack(packed)


@given(st.lists(st.integers(1, 6), max_size=12), st.randoms(use_true_random=False))
def test_lengths_of_a_thinner_sample_are_those_of_its_keys(counts: list[int], rng: object) -> None:
    lengths = np.array([(n, n - n // 3, n // 4) for n in counts], dtype=np.int64).reshape(-1, 3)
    mask = np.array([rng.random() < 0.5 for _ in range(sum(counts))], dtype=bool)  # type: ignore[attr-defined]
    expected, start = [], 0
    for row in lengths.tolist():
        expected.append([int(mask[start : start + one].sum()) for one in row])
        start += row[0]
    assert sampled_lengths(lengths, mask).tolist() == expected
