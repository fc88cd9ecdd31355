"""The exporter's thread: what goes wrong in it is nobody else's trouble."""

import logging
import threading
from unittest.mock import Mock, call

import pytest

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
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "the export of figures failed and will be tried again"


def test_a_part_that_starts_or_ends_has_no_figures_and_that_is_no_error(caplog):
    with caplog.at_level(logging.INFO):
        MetricsExport("tier").attempt(Mock(side_effect=ShardUnavailable("It is closed.")), 1.0)
    assert caplog.records == []


@pytest.fixture
def look() -> Mock:
    return Mock(return_value=Figures())


def test_figures_are_not_looked_at_twice_in_a_moment(look):
    export = MetricsExport("tier")
    for now in (10.0, 10.1, 10.2, 11.0):
        export.attempt(look, now)
    assert look.call_args_list == [call(10.0), call(11.0)]


def test_the_more_work_it_is_to_look_the_longer_is_the_pause(look, monkeypatch):
    monkeypatch.setattr(metrics_export.time, "thread_time", lambda: 0.1 * look.call_count)
    export = MetricsExport("tier")
    for tenths in range(100, 170):
        export.attempt(look, tenths / 10)
    assert look.call_args_list == [call(10.0), call(15.0)]
