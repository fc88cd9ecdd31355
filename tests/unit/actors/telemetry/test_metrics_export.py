"""The exporter's thread: what goes wrong in it is nobody else's trouble."""

import logging
import threading

from kvray.actors.telemetry import metrics_export
from kvray.actors.telemetry.figures import Figures
from kvray.actors.telemetry.metrics_export import MetricsExport, MetricsThread
from kvray.errors import ShardUnavailable

PATIENT_S = 60.0


def test_what_goes_wrong_is_logged_once_and_tried_again(caplog):
    looks, enough = [], threading.Event()

    def look(now: float) -> Figures:
        looks.append(now)
        if len(looks) < 4:
            raise ValueError("a defect")
        enough.set()
        return Figures()

    thread = MetricsThread(look, "tier", every_s=0.3)
    try:
        assert enough.wait(PATIENT_S)
    finally:
        thread.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "the export of figures failed and will be tried again"
    ]


def test_a_part_that_starts_or_ends_has_no_figures_and_that_is_no_error(caplog):
    def look(_: float) -> Figures:
        raise ShardUnavailable("The arena is closed.")

    with caplog.at_level(logging.INFO):
        MetricsExport("tier").attempt(look, 1.0)
    assert caplog.records == []


def test_figures_are_not_looked_at_twice_in_a_moment():
    looks: list[float] = []

    def look(now: float) -> Figures:
        looks.append(now)
        return Figures()

    export = MetricsExport("tier")
    for now in (10.0, 10.1, 10.2, 11.0):
        export.attempt(look, now)
    assert looks == [10.0, 11.0]


def test_the_more_work_it_is_to_look_the_longer_is_the_pause(monkeypatch):
    worked_s = 0.0
    monkeypatch.setattr(metrics_export.time, "thread_time", lambda: worked_s)
    looks: list[float] = []

    def look(now: float) -> Figures:
        nonlocal worked_s
        worked_s += 0.1
        looks.append(now)
        return Figures()

    export = MetricsExport("tier")
    for tenths in range(100, 170):
        export.attempt(look, tenths / 10)
    assert looks == [10.0, 15.0]
