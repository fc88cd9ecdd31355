import gzip
import json
import lzma
import tarfile
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.lab.replay import Trace, infinite, read_trace
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, excerpt

LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
SESSION = {
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [{"t": 1.5, "in": 130, "hash_ids": [1, 2], "model": "a"}],
}


def same(one: Trace, other: Trace) -> bool:
    arrays = ("times", "starts", "ids", "num_tokens")
    return all((getattr(one, name) == getattr(other, name)).all() for name in arrays)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_mooncake_s_lines_are_read_with_times_in_seconds(tmp_path: Path) -> None:
    second = LINE | {"timestamp": 1500, "input_length": 513}
    trace = read_trace(write_lines(tmp_path / "made.jsonl", LINE, second))
    assert trace.name == "made"
    assert trace.block_tokens == 512
    assert trace.times.tolist() == [0.0, 1.5]
    assert trace.num_tokens.tolist() == [600, 513]
    assert trace.ids.tolist() == [0, 1, 0, 1]


def test_lines_are_the_same_trace_however_they_are_packed(tmp_path: Path) -> None:
    content = gzip.decompress(CONVERSATION.read_bytes())
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.xz").write_bytes(lzma.compress(content))
    for name in ("plain", "packed.xz"):
        assert same(read_trace(tmp_path / name), excerpt(CONVERSATION))


def test_empty_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    path.write_text(f"\n{json.dumps(LINE)}\n\n")
    assert read_trace(path).num_requests == 1


def test_blocks_of_another_size_are_read_when_it_is_given(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "made.jsonl", LINE | {"input_length": 32})
    assert read_trace(path, block_tokens=16).block_tokens == 16
    with pytest.raises(ConfigError, match=r"line 1: 32 tokens are not 2 blocks.*--block-tokens"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 0, "input_le', "is no JSON"),
        ("[1, 2]", "is no JSON object"),
        (json.dumps(LINE | {"hash_ids": "12"}), r'hash_ids must be a valid .*, and is "12"'),
        (
            json.dumps(LINE | {"hash_ids": [0, 1.5]}),
            r"hash_ids\[1\] must be .*int.* 1\.5",
        ),
        (json.dumps(LINE | {"hash_ids": [0, 2**63]}), r"hash_ids\[1\] must be less than 9223"),
        (json.dumps(LINE | {"timestamp": "now"}), 'timestamp must be a valid number.*"now"'),
        (json.dumps(LINE | {"timestamp": float("nan")}), "timestamp must be a finite number"),
        (json.dumps({**LINE, "input_length": -1}), "input_length must be greater.*, and is -1"),
        (json.dumps({**LINE, "input_length": True}), "input_length must be a valid int.* is true"),
        (json.dumps({"timestamp": 0, "hash_ids": []}), "input_length is missing"),
        (json.dumps(LINE | {"hash_ids": []}), "600 tokens are not 0 blocks"),
        ("\udcff", "is no JSON"),
        ('{"a": "\udcff"}', "is no JSON .*unicode"),
        ("9" * 5000, "is no JSON"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "made.jsonl"
    text = f"{json.dumps(LINE)}\n{line}\n{json.dumps(LINE)}\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"made\.jsonl, line 2:? ?{message}.*; g(et|ive) "):
        read_trace(path)


def test_a_session_s_partial_block_may_have_an_id_or_none(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for ids in ([1, 2], [1, 2, 3]):
        requests = [{"t": 0, "in": 130, "hash_ids": ids}]
        path.write_text(json.dumps(SESSION | {"requests": requests}))
        assert read_trace(path).num_refs == len(ids)


def test_a_session_s_damaged_request_is_named(tmp_path: Path) -> None:
    inner = {"t": 0, "requests": [{"t": 0, "in": 64}]}
    path = tmp_path / "one.json"
    path.write_text(json.dumps(SESSION | {"requests": [*SESSION["requests"], inner]}))
    where = r"one\.json, requests\[1\], requests\[0\]: 64 tokens are not 0 blocks"
    with pytest.raises(ConfigError, match=where):
        read_trace(path)


def test_a_damaged_session_says_in_which_line(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"block_size": 64,\n"requests": [\n{]}')
    with pytest.raises(ConfigError, match=r"one\.json is no JSON .* at line 3"):
        read_trace(tmp_path / "one.json")


def test_sessions_are_the_same_trace_in_a_directory_and_in_an_archive(tmp_path: Path) -> None:
    with tarfile.open(SESSIONS) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
        with tarfile.open(tmp_path / "again.tar.gz", "w:gz") as again:
            again.add(tmp_path / "unpacked", "unpacked")
    assert same(read_trace(tmp_path / "unpacked"), excerpt(SESSIONS))
    assert same(read_trace(tmp_path / "again.tar.gz"), excerpt(SESSIONS))
    assert read_trace(tmp_path / "again.tar.gz").name == "again"


def test_an_archive_s_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(SESSION | {"block_size": 0}))
    with tarfile.open(tmp_path / "many.tar", "w") as archive:
        archive.add(tmp_path / "bad.json", "in/bad.json")
    with pytest.raises(ConfigError, match=r"many\.tar: in/bad\.json: block_size must be"):
        read_trace(tmp_path / "many.tar")


def test_the_excerpt_s_sessions_repeat_most_of_their_blocks() -> None:
    trace = excerpt(SESSIONS)
    assert trace.block_tokens == 64
    assert trace.num_requests == 65  # 21 with those of four subagents' 44
    assert infinite(trace).hit_ratio > 0.8


@pytest.mark.parametrize("path", [CONVERSATION, SESSIONS], ids=lambda path: path.suffix)
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, path: Path) -> None:
    content = path.read_bytes()
    (tmp_path / "short").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"is cut short or damaged .*; get the file again"):
        read_trace(tmp_path / "short")


@pytest.mark.parametrize("content", [b"", b"a,b,c\n1,2,3\n", b"\x00\x01\x02", b"{}"])
def test_what_is_no_trace_is_refused_with_what_would_be(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "what").write_bytes(content)
    with pytest.raises(ConfigError, match=r"no known trace: neither lines of JSON .* Mooncake"):
        read_trace(tmp_path / "what")


def test_a_directory_without_a_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no session in .*\.json file"):
        read_trace(tmp_path)


def test_a_trace_without_a_block_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "made.jsonl", LINE | {"hash_ids": [], "input_length": 0})
    with pytest.raises(ConfigError, match="nothing to replay"):
        read_trace(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read \(No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
