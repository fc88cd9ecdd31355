"""The supervisor counts what there should be, what answers, and what stopped."""

from kvray.actors.telemetry.figures import Figures, PartCounts

ALL = {"kvray-shard-a", "kvray-shard-b", "kvray-mover-a", "kvray-lookup"}
LESS = ALL - {"kvray-shard-a"}


def counted() -> PartCounts:
    counts = PartCounts()
    counts.expect(ALL)
    return counts


def total(figures: Figures, name: str, kind: str) -> float:
    (one,) = figures.totals
    return one.totals[name, (kind,)]


def test_a_part_that_starts_is_no_outage_and_one_that_stops_is_one() -> None:
    counts = counted()
    counts.note(ALL, LESS, [])
    counts.note(ALL, ALL, [])
    figures = counts.note(ALL, LESS, [])
    figures = counts.note(ALL, LESS, [])

    assert figures.gauges["parts", ("shard",)] == 2
    assert figures.gauges["answering_parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("lookup",)] == 1
    assert total(figures, "outages_total", "shard") == 1
    assert total(figures, "outages_total", "lookup") == 0


def test_a_part_whose_node_has_left_is_no_outage() -> None:
    counts = counted()
    counts.note(ALL, ALL, [])

    counts.expect(LESS)
    figures = counts.note(LESS, LESS, [])

    assert total(figures, "outages_total", "shard") == 0
    assert figures.gauges["parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("shard",)] == 1


def test_a_part_that_was_not_asked_has_not_stopped() -> None:
    counts = counted()
    counts.note(ALL, ALL, [])
    figures = counts.note({"kvray-shard-b"}, set(), [])

    assert figures.gauges["answering_parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("mover",)] == 1
    assert total(figures, "outages_total", "shard") == 1


def test_frozen_parts_that_were_ended_are_counted() -> None:
    figures = counted().note(ALL, LESS, ["kvray-shard-a"])

    assert total(figures, "ended_parts_total", "shard") == 1
