"""What the log of an actor says once, again, and not over and over."""

import io
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kvray.actors.telemetry.log_lines import Lines, Quiet

TIER = "blue"
WHO = "kvray-shard-1a2b"


@dataclass
class Log:
    """A logger of an actor's process, on a clock of its own."""

    logger: logging.Logger
    output: io.StringIO
    now: float = 1_000.0

    def tick(self, problem: str, *, seconds: float = 1.0) -> None:
        """One round of a loop that finds something wrong."""
        self._log("cannot do it: %s", problem)
        self.now += seconds

    def event(self, text: str) -> None:
        """Something of another place in the code."""
        self._log("event: %s", text)

    def _log(self, message: str, *args: object) -> None:
        line = sys._getframe(1).f_lineno
        record = self.logger.makeRecord(
            self.logger.name, logging.WARNING, __file__, line, message, args, sys.exc_info()
        )
        record.created = self.now
        if record.exc_info == (None, None, None):
            record.exc_info = None
        self.logger.handle(record)

    @property
    def lines(self) -> list[str]:
        return self.output.getvalue().splitlines()


@pytest.fixture
def log() -> Log:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(Lines(TIER, WHO))
    handler.addFilter(Quiet())
    logger = logging.Logger("kvray.shard")
    logger.addHandler(handler)
    return Log(logger, output)


def test_a_line_has_time_level_logger_tier_and_who_once(log):
    log.tick("no room")
    log.logger.warning("%s: holder %s died", WHO, "engine")
    line, other = log.lines
    assert line[:2] == "19"
    assert line[23:] == f" WARNING kvray.shard {TIER}/{WHO}: cannot do it: no room"
    assert other.endswith(f"kvray.shard {TIER}/{WHO}: holder engine died")


def test_a_sentence_of_several_lines_is_one_line_and_a_traceback_follows_it(log):
    log.tick("first\nsecond")
    try:
        raise ValueError("a defect")
    except ValueError:
        log.event("ended")
    said, event, *traceback = log.lines
    assert said.endswith("first second")
    assert event.endswith("event: ended")
    assert traceback[-1] == "ValueError: a defect"


def test_what_fails_every_second_for_an_hour_is_said_every_ten_minutes(log):
    for _ in range(3_600):
        log.tick("the lookup does not answer")
    first, *others = log.lines
    assert first.endswith("the lookup does not answer")
    assert len(others) == 5
    assert all(line.endswith("(599 more like it since it was said)") for line in others)


def test_sentences_that_differ_each_time_are_at_most_ten_a_minute(log):
    for count in range(600):
        log.tick(f"{count} bytes are left")
    assert len(log.lines) == 10 * 10
    assert log.lines[10].endswith("60 bytes are left (50 more like it since it was said)")


def test_what_is_said_often_keeps_nothing_else_from_being_said(log):
    for count in range(100):
        log.tick(f"{count} bytes are left", seconds=0.0)
    nodes = ["node 1 is gone", "node 2 is gone"]
    for gone in nodes:
        log.event(gone)
    assert [line.partition("event: ")[2] for line in log.lines[-2:]] == nodes


def test_what_it_remembers_is_bounded(log):
    quiet = log.logger.handlers[0].filters[0]
    assert isinstance(quiet, Quiet)
    for count in range(5_000):
        log.tick(f"{count}", seconds=61.0)
    assert len(quiet._counts) <= 1_024


def test_threads_may_log_at_once(log):
    def ticks(thread: int) -> None:
        for count in range(400):
            log.logger.warning("thread %d: %d", thread, count)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ticks, range(8))) == [None] * 8
    assert len(log.lines) == 10


def test_a_sentence_that_does_not_fit_its_values_ends_nobody(log, capsys, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", True)  # which NIXL, once imported, turns off
    log.logger.warning("%d blocks", "no number")
    assert "no number" in capsys.readouterr().err
    log.event("goes on")
    assert log.lines[-1].endswith("goes on")


def test_an_engines_process_is_left_its_logging():
    code = (
        "import logging, kvray, kvray.connector, kvray.tensor_cache\n"
        "names = ['', *(name for name in logging.root.manager.loggerDict if 'kvray' in name)]\n"
        "logs = [logging.getLogger(name) for name in names]\n"
        "assert len(logs) > 3\n"
        "assert not any(log.handlers or not log.propagate for log in logs), logs\n"
        "assert all(log.level == logging.NOTSET for log in logs[1:]), logs\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
