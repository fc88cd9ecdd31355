"""How an entry of a log is shown."""

import time
from collections.abc import Iterator

import pytest

from kvray.actors.telemetry.log_files import LogEntry
from kvray.cli.logs import line


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_an_entry_has_its_time_level_and_the_short_name_of_its_part() -> None:
    entry = LogEntry(
        time_s=1_700_000_000.25, level="WARNING", tier="blue", part="kvray-shard-1a2b", text="slow"
    )
    assert line(entry) == "2023-11-14 22:13:20.250 WARNING shard-1a2b: slow"
