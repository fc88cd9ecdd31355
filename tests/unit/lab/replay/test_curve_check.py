"""The check of a shard's curve on a trace, and its report."""

import json

import pytest
from rich.console import Console

from kvray.errors import ConfigError
from kvray.lab.replay.curve_check import check_curve, check_curves, curves_to_json, print_curves
from kvray.lab.replay.reading import TraceBuilder
from tests.unit.lab.replay.excerpts import SYNTHETIC, excerpt


def test_a_trace_that_fits_into_the_sample_is_drawn_exactly() -> None:
    seen: list[tuple[str, int, int]] = []
    (found,) = check_curves(
        excerpt(SYNTHETIC),
        [200, 800, 1600],
        policies=["gittins"],
        nvme_blocks=300,
        admissions=["likely"],
        seed=1,
        progress=lambda *step: seen.append(step),
    )
    assert found.rate == 1
    assert found.mean_error < 1e-5
    assert 0 < found.memory_bytes < 64 * 2**20
    assert found.note_us < 50
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4]
    console = Console(width=120)
    with console.capture() as said:
        print_curves(console, [found])
    assert "Mean error 0.00 points" in said.get()
    assert json.loads(curves_to_json([found]))["checks"][0]["mean_error"] < 1e-5


def test_a_trace_that_is_too_short_is_refused() -> None:
    builder = TraceBuilder(name="short", block_tokens=4)
    builder.add(time_s=0, num_tokens=8, ids=[1, 2])
    with pytest.raises(ConfigError, match="too short"):
        check_curve(builder.build(), [10], policy="lru")
