"""The log lines of a node's parts, as they come out of files that Ray writes and rotates."""

import logging
import time
from pathlib import Path

import pytest

from kvray.actors.telemetry.log_files import LogEntry, LogFiles, parse
from kvray.actors.telemetry.log_lines import Lines

SHARD, MOVER = "kvray-shard-1a2b", "kvray-mover-1a2b"
START = ":job_id:01000000\n:actor_name:ShardActor\n"


def line(text: str, *, at: float = 0.0, part: str = SHARD, tier: str = "blue") -> str:
    """Return what a part writes, `at` seconds after a moment of these tests."""
    record = logging.LogRecord("kvray.shard", logging.INFO, "", 0, text, None, None)
    record.created = 1_700_000_000.25 + at
    record.msecs = record.created % 1 * 1000
    return Lines(tier, part).format(record) + "\n"


def texts(entries: list[LogEntry]) -> list[str]:
    return [one.text for one in entries]


def files(directory: Path) -> LogFiles:
    return LogFiles(directory, tier="blue", parts={SHARD, MOVER})


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(lines))


def test_what_a_part_writes_is_read_back() -> None:
    (entry,) = parse(line("no room"))
    assert entry == LogEntry(
        time_s=1_700_000_000.25, level="INFO", tier="blue", part=SHARD, text="no room"
    )


def test_a_sentence_that_begins_with_its_part_loses_the_name() -> None:
    assert texts(list(parse(line(f"{SHARD} attached to arena 7")))) == ["attached to arena 7"]


def test_a_traceback_goes_with_its_sentence_and_rays_marks_go_nowhere() -> None:
    text = "words of a library\n" + line("it ended") + "Traceback:\n:actor_name:Shard(1)\n  boom\n"
    assert texts(list(parse(text + line("next")))) == ["it ended\nTraceback:\n  boom", "next"]


def test_what_follows_an_entry_later_belongs_to_it() -> None:
    (before,) = parse(line("it ended"))
    (more,) = parse("boom\n", before)
    assert (more.text, more.part, more.time_s) == ("boom", before.part, before.time_s)
    assert not list(parse("", before))


def test_the_lines_of_an_entry_are_bounded() -> None:
    (entry,) = parse(line("it ended") + "noise\n" * 10_000)
    assert entry.text.count("\n") < 200


def test_files_are_merged_by_time_without_other_parts_and_tiers(tmp_path: Path) -> None:
    append(tmp_path / "worker-a.err", START, line("first"), line("third", at=2.0))
    append(tmp_path / "worker-b.err", line("second", at=1.5, part=MOVER))
    append(tmp_path / "worker-c.err", line("of another tier", tier="green"))
    append(tmp_path / "worker-d.err", line("of another node", part="kvray-shard-9f9f"))
    append(tmp_path / "worker-a.out", line("no log"))
    assert texts(files(tmp_path).read()) == ["first", "second", "third"]


def test_each_line_is_told_once_and_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "worker-a.err"
    reader = files(tmp_path)
    append(log, line("one"), line("two", at=1.0)[:-5])
    assert texts(reader.read()) == ["one"]
    assert reader.read() == []
    append(log, line("two", at=1.0)[-5:], line("three", at=2.0))
    assert texts(reader.read()) == ["two", "three"]


def test_nothing_is_lost_or_told_twice_when_ray_rotates(tmp_path: Path) -> None:
    log = tmp_path / "worker-a.err"
    reader = files(tmp_path)
    append(log, line("one"))
    assert texts(reader.read()) == ["one"]
    append(log, line("two", at=1.0))
    log.rename(tmp_path / "worker-a.err.1")
    append(log, line("three", at=2.0))
    assert texts(reader.read()) == ["two", "three"]
    assert texts(files(tmp_path).read()) == ["one", "two", "three"]
    (tmp_path / "worker-a.err.1").unlink()
    append(log, line("four", at=3.0))
    assert texts(reader.read()) == ["four"]


def test_a_shorter_file_in_the_place_of_a_removed_one_is_read_from_its_beginning(
    tmp_path: Path,
) -> None:
    log = tmp_path / "worker-a.err"
    reader = files(tmp_path)
    append(log, *(line(f"old {number}") for number in range(9)))
    reader.read()
    log.write_text(line("new"))  # the same inode
    assert texts(reader.read()) == ["new"]


def test_of_a_file_without_end_the_newest_lines_are_read(tmp_path: Path) -> None:
    lines = [line(f"{number:06d} {'x' * 900}", at=number / 100) for number in range(2_000)]
    append(tmp_path / "worker-a.err", *lines)
    began = time.monotonic()
    entries = files(tmp_path).read()
    assert time.monotonic() - began < 5
    assert 900 < len(entries) < 1_200
    assert entries[-1].text.startswith("001999")


def test_a_directory_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert files(tmp_path / "none").read() == []


@pytest.mark.parametrize("noise", [b"\xff\xfe\n", b"\x00\n", b"\x85\n"])
def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path, noise: bytes) -> None:
    (tmp_path / "worker-a.err").write_bytes(noise + line("one").encode() + noise)
    (entry,) = files(tmp_path).read()
    assert entry.text.startswith("one")
