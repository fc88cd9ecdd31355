"""Rows of the bench, their table and their JSON; and how much `kvray bench local` measures."""

import json

import pytest

from kvray.errors import ConfigError
from kvray.lab.bench.local import LocalScale
from kvray.lab.bench.report import Report, Row, copy_row, cpu_row, hash_rows, value_row
from kvray.lab.bench.runner import LARGE_BYTES, SMALL_BYTES, Duration, Pair

SCALE = LocalScale.fit(2**30, repeat=None, quick=False)


def pairs(ours: float, floor: float, *, cpu_s: float = 0.0) -> list[Pair]:
    return [
        Pair(ours=Duration(seconds=ours, cpu_s=cpu_s), floor=Duration(seconds=floor, cpu_s=0.5))
    ]


def rows() -> list[Row]:
    return [
        copy_row("store", "store_{}_4mib", pairs(2, 1), num_bytes=10**9, least=0.9),
        copy_row("first", "first_store_{}", pairs(0.05, 0.1), num_bytes=10**9, least_gb_s=10),
        cpu_row(
            "CPU",
            ("retrieve_cpu_s_per_gb", "retrieve_floor_cpu_s_per_gb"),
            pairs(2, 1, cpu_s=1),
            num_bytes=10**9,
        ),
        *hash_rows("lookup", "lookup_8k", pairs(3e-4, 2e-4), most_over_hash=1.4, most_spread=3),
    ]


REPORT = Report(rows=rows(), note="Two of three rows.", facts={"pairs": 1})


def copy_met(ours: float, floor: float) -> bool | None:
    return copy_row("", "{}", pairs(ours, floor), num_bytes=10**9, least=0.9).is_met


def test_targets_are_least_or_most() -> None:
    assert copy_met(1, 0.9)
    assert copy_met(1, 0.89) is False
    assert copy_row("", "{}", pairs(1, 1), num_bytes=1).is_met is None
    assert value_row("", "ms", 1.4, "x", most=1.4).is_met
    assert value_row("", "ms", 1.41, "x", most=1.4).is_met is False
    assert value_row("", "ms", 1.41, "x").is_met is None


def test_rows_are_judged_by_what_their_target_is_about() -> None:
    assert [row.is_met for row in rows()] == [False, True, None, False, True]
    by_time = hash_rows("", "x", pairs(3e-4, 1e-4), most_ms=0.4, most_p99_ms=0.2)
    assert [row.is_met for row in by_time] == [True, False]
    assert [row.is_met for row in hash_rows("", "x", pairs(1, 1))] == [None, None]


def test_json_has_the_figures_of_every_row() -> None:
    found = json.loads(REPORT.to_json())
    assert found["store_ratio_4mib"] == 0.5
    assert found["store_floor_gb_s_4mib"] == 1
    assert found["first_store_gb_s"] == 20
    assert found["retrieve_cpu_s_per_gb"] == 1
    assert found["lookup_8k_ms_p50"] == found["lookup_8k_ms_p99"] == 0.3
    assert found["lookup_8k_over_hash"] == 1.5
    assert found["lookup_8k_p99_over_p50"] == 1
    assert found["missed"] == ["store", "lookup"]
    assert found["pairs"] == 1
    assert {"cpu_cores", "machine", "version"} <= set(found)


def test_table_shows_ours_floor_and_ratio_and_no_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    REPORT.show()
    text = capsys.readouterr().out
    store = next(line for line in text.splitlines() if "store" in line)
    assert store.split() == ["store", "0.5", "GB/s", "1", "GB/s", "0.50"]
    assert text.rstrip().endswith(REPORT.note)
    for word in ("target", "≥", "✘"):
        assert word not in text


def test_scale_fits_the_blocks_into_the_capacity() -> None:
    assert (SCALE.num_large, SCALE.num_small) == (256, 256)
    assert (SCALE.num_sections(LARGE_BYTES), SCALE.num_sections(SMALL_BYTES)) == (1, 32)
    assert SCALE.pairs_of(SMALL_BYTES) > SCALE.pairs_of(LARGE_BYTES)
    half = LocalScale.fit(2**29, repeat=7, quick=False)
    assert (half.num_large, half.pairs, half.short_lookups) == (128, 7, 7)
    assert LocalScale.fit(2**40, repeat=None, quick=False).num_large == 256
    assert LocalScale.fit(2**40, repeat=None, quick=True).capacity == 2**26


def test_capacity_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64MiB"):
        LocalScale.fit(2**20, repeat=None, quick=False)
