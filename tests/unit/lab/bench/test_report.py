"""Interleaved pairs, the figures that follow from them, their table and their JSON."""

from collections.abc import Callable

from kvray.lab import runner
from kvray.lab.bench.local import LocalScale
from kvray.lab.bench.report import bench_report, copy_row, cpu_row, hash_rows

SCALE = LocalScale.fit(2**30, repeat=None, quick=False)


def pair(ours: float, floor: float, *, cpu_s: float = 0.0) -> runner.Pair:
    return runner.Pair(runner.Duration(ours, cpu_s), runner.Duration(floor, cpu_s / 2))


NOTE = "Two of three rows."
CPU = ("retrieve_cpu_s_per_gb", "retrieve_floor_cpu_s_per_gb")
ROWS = [
    copy_row("store", "store_{}_4mib", [pair(2, 1)], num_bytes=10**9),
    copy_row("first", "first_store_{}", [pair(0.05, 0.1)], num_bytes=10**9),
    cpu_row("CPU", CPU, [pair(2, 1, cpu_s=1)], num_bytes=10**9),
    *hash_rows("lookup", "lookup_8k", [pair(3e-4, 2e-4)], has_spread=True),
]
REPORT = bench_report(ROWS, note=NOTE, facts={"pairs": 1})


def test_json_has_the_figures_of_every_row_and_the_table_ours_floor_and_ratio(capsys):
    found = REPORT.facts
    assert found["store_ratio_4mib"] == 0.5
    assert found["store_floor_gb_s_4mib"] == 1
    assert found["first_store_gb_s"] == 20
    assert found["retrieve_cpu_s_per_gb"] == 1
    assert found["lookup_8k_ms_p50"] == found["lookup_8k_ms_p99"] == 0.3
    assert found["lookup_8k_over_hash"] == 1.5
    assert found["lookup_8k_p99_over_p50"] == 1
    assert found["pairs"] == 1
    assert {"cpu_cores", "machine", "version"} <= set(found)
    REPORT.show(as_json=False)
    text = capsys.readouterr().out
    store = next(line for line in text.splitlines() if "store" in line)
    assert store.split() == ["store", "0.5", "GB/s", "1", "GB/s", "0.50"]
    assert text.rstrip().endswith(NOTE)


def test_scale_fits_the_blocks_into_the_capacity():
    large, small = SCALE.large, SCALE.small
    assert (large.shape[0], small.shape[0]) == (256, 256)
    assert (large.num_sections, small.num_sections) == (1, 32)
    assert small.pairs > large.pairs
    half = LocalScale.fit(2**29, repeat=7, quick=False)
    assert (half.large.shape[0], half.large.pairs, half.short_lookups) == (128, 7, 7)
    assert LocalScale.fit(2**40, repeat=None, quick=False).large.shape[0] == 256
    assert LocalScale.fit(2**40, repeat=None, quick=True).capacity == 2**26


def test_who_goes_first_takes_turns():
    steps: list[str] = []

    def step(name: str, seconds: float) -> Callable[[int], runner.Duration]:
        return lambda index: steps.append(f"{name}{index}") or runner.Duration(seconds=seconds)

    pairs = runner.measure(3, ours=step("ours", 2), floor=step("floor", 1))
    assert steps == ["floor0", "ours0", "ours1", "floor1", "floor2", "ours2"]
    assert pairs == [pair(2, 1)] * 3


def test_ratio_is_the_median_of_pairs_and_processes_are_timed_from_first_start_to_last_end():
    pairs = [pair(1, 1), pair(2, 4), pair(8, 2)]
    assert runner.speed_ratio(pairs) == runner.time_ratio(pairs) == 1
    timings = [runner.Duration(seconds=seconds) for seconds in (5, 1, 4, 2, 3)]
    assert runner.median_s(timings) == 3
    assert [runner.percentile_s(timings, percent) for percent in (99, 60, 0)] == [5, 3, 1]
    assert runner.percentile_s([runner.Duration(seconds=n) for n in range(1, 201)], 99) == 198
    assert runner.over_all([(1, 4, 0.5), (2, 6, 1.5)]) == runner.Duration(seconds=5, cpu_s=2)
