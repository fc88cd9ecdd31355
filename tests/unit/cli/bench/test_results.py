"""Rows of the bench, its table and its JSON."""

import json

import pytest
from rich.console import Console

from kvray.cli.bench.pairs import Pair, Timing
from kvray.cli.bench.report import make_table, print_all, to_json
from kvray.cli.bench.results import (
    Result,
    Target,
    copy_result,
    cpu_result,
    first_store_result,
    lookup_results,
)
from kvray.cli.bench.scale import LARGE_BYTES, SMALL_BYTES, Scale
from kvray.errors import ConfigError

SCALE = Scale.fit(2**30, repeat=None, quick=False)


def pairs(ours: float, floor: float, *, cpu_s: float = 0.0) -> list[Pair]:
    return [Pair(ours=Timing(seconds=ours, cpu_s=cpu_s), floor=Timing(seconds=floor, cpu_s=0.5))]


def rows() -> list[Result]:
    return [
        copy_result("store", "store_{}_4mib", pairs(2, 1), num_bytes=10**9, least=0.9),
        first_store_result(pairs(0.05, 0.1), num_bytes=10**9, least_gb_s=10),
        cpu_result(pairs(2, 1, cpu_s=1), num_bytes=10**9),
        *lookup_results("lookup", "lookup_8k", pairs(3e-4, 2e-4), most=1.4, most_spread=3),
    ]


def test_targets_are_least_or_most() -> None:
    assert Target(limit=0.9, is_least=True).is_met(0.9)
    assert not Target(limit=0.9, is_least=True).is_met(0.89)
    assert not Target(limit=1.4, is_least=False).is_met(1.41)
    assert str(Target(limit=0.9, is_least=True)) == "≥ 0.9"


def test_rows_are_judged_by_what_their_target_is_about() -> None:
    assert [row.is_met for row in rows()] == [False, True, None, False, True]


def test_json_has_the_figures_of_every_row() -> None:
    found = json.loads(to_json(rows(), SCALE))
    assert found["store_ratio_4mib"] == 0.5
    assert found["store_floor_gb_s_4mib"] == 1
    assert found["first_store_gb_s"] == 20
    assert found["retrieve_cpu_s_per_gb"] == 1
    assert found["lookup_8k_ms_p50"] == 0.3
    assert found["lookup_8k_over_hash"] == 1.5
    assert found["missed"] == ["store", "lookup"]


def test_table_shows_ours_floor_ratio_and_target() -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(make_table(rows()))
    lines = capture.get().splitlines()
    store = next(line for line in lines if "store" in line)
    assert store.split() == ["store", "0.5", "GB/s", "1", "GB/s", "0.50", "≥", "0.9", "✘"]


def test_summary_counts_the_missed_targets() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        print_all(console, rows(), SCALE)
    assert "2 of 4 targets are missed." in capture.get()


def test_scale_fits_the_blocks_into_the_capacity() -> None:
    assert (SCALE.num_large, SCALE.num_small) == (256, 256)
    assert SCALE.num_shelves(SCALE.num_small * SMALL_BYTES) == 32
    assert SCALE.pairs_of(SMALL_BYTES) > SCALE.pairs_of(LARGE_BYTES)
    half = Scale.fit(2**29, repeat=7, quick=False)
    assert (half.num_large, half.pairs, half.short_lookups) == (128, 7, 7)
    assert Scale.fit(2**40, repeat=None, quick=False).num_large == 256
    assert Scale.fit(2**40, repeat=None, quick=True).capacity == 2**26


def test_capacity_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64MiB"):
        Scale.fit(2**20, repeat=None, quick=False)
