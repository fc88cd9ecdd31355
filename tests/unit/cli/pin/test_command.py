"""`kvray pin`: what it refuses before it asks a tier, and its table."""

from pathlib import Path

import pytest

from kvray.cli.pin.command import _print
from kvray.cli.pin.duration import parse_duration, shown_duration
from kvray.errors import ConfigError
from tests.forks import RunKvray


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h", 3600), (" 1.5h ", 5400), ("7d", 604800)],
)
def test_durations_have_a_unit(given: str, seconds: float) -> None:
    assert parse_duration(given) == seconds


@pytest.mark.parametrize("given", ["", "1", "h", "-1h", "1h30m", "0s", "400d", "1 week"])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(given)


def test_durations_show_their_two_largest_units() -> None:
    shown = [shown_duration(seconds) for seconds in (0.2, 59, 3600, 5445, 200_000)]
    assert shown == ["0s", "59s", "1h", "1h 30m", "2d 7h"]


def test_a_pin_without_a_time_or_a_name_is_refused(run_kvray: RunKvray, tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text("[1, 2]")
    for words, says in (
        (["prompt.json"], "--for 1h"),
        (["prompt.json", "--for", "1 week"], "no duration"),
        (["prompt.json", "--for", "1h", "--remove", "p"], "not both"),
        (["--for", "1h"], "needs TOKENS"),
        (["prompt.json", "--for", "1h", "--name", "x" * 81], "1 to 80"),
    ):
        done = run_kvray("pin", *words)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_the_table_says_where_a_pinned_prompt_is(capsys: pytest.CaptureFixture[str]) -> None:
    pin = {"owner": "ops", "num_tokens": 391, "num_blocks": 12, "seconds_left": 3600.0}
    here = {"kvray-shard-0123": 12, "kvray-shard-4567": 0}
    _print([{**pin, "name": "one", "here": here}, {**pin, "name": "two", "here": {}}])
    shown = capsys.readouterr().out
    assert "12 on 0123" in shown
    assert "4567" not in shown
    assert "not stored yet" in shown
    _print([])
    assert "Nothing is pinned" in capsys.readouterr().out
