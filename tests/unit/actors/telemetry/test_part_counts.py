"""The supervisor counts what there should be, what answers, and what stopped."""

from kvray.actors.telemetry.figures import Figures
from kvray.actors.telemetry.part_counts import PartCounts

PARTS = ("kvray-shard-a", "kvray-shard-b", "kvray-mover-a", "kvray-lookup")


def total(figures: Figures, name: str, kind: str) -> float:
    (one,) = figures.totals
    return one.totals[name, (kind,)]


def test_a_part_that_starts_is_no_outage_and_one_that_stops_is_one() -> None:
    counts = PartCounts()
    counts.note(PARTS, PARTS[1:], [])
    counts.note(PARTS, PARTS, [])
    figures = counts.note(PARTS, PARTS[1:], [])
    figures = counts.note(PARTS, PARTS[1:], [])

    assert figures.gauges["parts", ("shard",)] == 2
    assert figures.gauges["answering_parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("lookup",)] == 1
    assert total(figures, "outages_total", "shard") == 1
    assert total(figures, "outages_total", "lookup") == 0


def test_a_part_whose_node_has_left_is_no_outage() -> None:
    counts = PartCounts()
    counts.note(PARTS, PARTS, [])

    figures = counts.note(PARTS[1:], PARTS[1:], [])

    assert total(figures, "outages_total", "shard") == 0
    assert figures.gauges["parts", ("shard",)] == 1


def test_frozen_parts_that_were_ended_are_counted() -> None:
    figures = PartCounts().note(PARTS, PARTS[1:], PARTS[:1])

    assert total(figures, "ended_parts_total", "shard") == 1
