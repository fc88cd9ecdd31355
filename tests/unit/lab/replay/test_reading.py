"""Traces of each format as they are read, and requests laid out as a trace."""

import gzip
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.lab.replay import Trace, infinite, read_trace
from kvray.lab.replay.reading import Session, TraceBuilder, lay_out, read_session
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, excerpt, paths

LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
SESSION = {
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [{"t": 1.5, "in": 130, "hash_ids": [1, 2], "model": "a"}],
}
INNER = {"t": 0, "requests": [{"t": 0, "in": 64}]}


def same(one: Trace, other: Trace) -> bool:
    arrays = ("times", "starts", "ids", "num_tokens")
    return all((getattr(one, name) == getattr(other, name)).all() for name in arrays)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_mooncake_s_lines_are_read_with_times_in_seconds_and_blocks_of_the_size_that_is_given(
    tmp_path,
):
    second = LINE | {"timestamp": 1500, "input_length": 513}
    trace = read_trace(write_lines(tmp_path / "made.jsonl", LINE, second))
    assert (trace.name, trace.block_tokens) == ("made", 512)
    assert trace.times.tolist() == [0.0, 1.5]
    assert trace.num_tokens.tolist() == [600, 513]
    assert trace.ids.tolist() == [0, 1, 0, 1]
    path = write_lines(tmp_path / "small.jsonl", LINE | {"input_length": 32})
    assert read_trace(path, block_tokens=16).block_tokens == 16
    with pytest.raises(ConfigError, match=r"line 1: 32 tokens are not 2 blocks.*--block-tokens"):
        read_trace(path)


def test_lines_are_the_same_trace_however_they_are_packed(tmp_path):
    content = gzip.decompress(CONVERSATION.read_bytes())
    (tmp_path / "plain").write_bytes(b"\n" + content + b"\n\n")  # empty lines are left out
    (tmp_path / "packed.xz").write_bytes(lzma.compress(content))
    for name in ("plain", "packed.xz"):
        assert same(read_trace(tmp_path / name), excerpt(CONVERSATION))


def test_lines_are_read_as_other_tools_write_numbers_and_text(tmp_path):
    """Hashes are unsigned, tables of numbers have a decimal point, and Windows marks UTF-8."""
    line = json.dumps(LINE | {"input_length": 600.0, "hash_ids": [2**64 - 1, 2**63]})
    (tmp_path / "made").write_text(f"{line}\n{line}\n", encoding="utf-8-sig")
    trace = read_trace(tmp_path / "made")
    assert trace.num_tokens.tolist() == [600, 600]
    assert trace.ids.tolist() == [0, 1, 0, 1]
    for ids in ([1, 2], [1, 2, 3]):  # a partial block of a session has an id or none
        session = SESSION | {"requests": [{"t": 0, "in": 130, "hash_ids": ids}]}
        (tmp_path / "one.json").write_text(json.dumps(session), encoding="utf-8-sig")
        assert read_trace(tmp_path / "one.json").num_refs == len(ids)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 0, "input_le', "is no JSON"),
        ("[1, 2]", "is no JSON object"),
        (json.dumps(LINE | {"hash_ids": "12"}), r'hash_ids must be a valid .*, and is "12"'),
        (json.dumps(LINE | {"hash_ids": [0, 1.5]}), r"hash_ids\[1\] must be .*int.* 1\.5"),
        (json.dumps(LINE | {"hash_ids": [0, 2**64]}), r"hash_ids\[1\] must be less than 1844"),
        (json.dumps(LINE | {"input_length": 600.5}), "input_length must be a valid int.* is 600"),
        (json.dumps(LINE | {"timestamp": "now"}), 'timestamp must be a valid number.*"now"'),
        (json.dumps(LINE | {"timestamp": float("nan")}), "timestamp must be a finite number"),
        (json.dumps(LINE | {"timestamp": 1e20}), "timestamp must be less than or equal to 1"),
        (json.dumps({**LINE, "input_length": -1}), "input_length must be greater.*, and is -1"),
        (json.dumps({**LINE, "input_length": True}), "input_length must be a valid int.* is true"),
        (json.dumps({"timestamp": 0, "hash_ids": []}), "input_length is missing"),
        (json.dumps(LINE | {"hash_ids": []}), "600 tokens are not 0 blocks"),
        ('{"a": "\udcff"}', "is no JSON .*unicode"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    path = tmp_path / "made.jsonl"
    text = f"{json.dumps(LINE)}\n{line}\n{json.dumps(LINE)}\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"made\.jsonl, line 2:? ?{message}.*; g(et|ive) "):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            json.dumps(SESSION | {"requests": [*SESSION["requests"], INNER]}),
            r", requests\[1\], requests\[0\]: 64 tokens are not 0 blocks",
        ),
        (json.dumps(SESSION | {"block_size": 0}), ": block_size must be"),
        ('{"block_size": 64,\n"requests": [\n{]}', r" is no JSON .* at line 3"),
    ],
    ids=["a request", "a field", "a line"],
)
def test_a_damaged_session_is_named_with_the_place_also_in_an_archive(tmp_path, text, where):
    (tmp_path / "one.json").write_text(text)
    with tarfile.open(tmp_path / "many.tar", "w") as archive:
        archive.add(tmp_path / "one.json", "in/one.json")
    for path, file in (("one.json", ""), ("many.tar", ": in/one.json")):
        with pytest.raises(ConfigError, match=rf"{path}{file}{where}"):
            read_trace(tmp_path / path)


def test_sessions_are_the_same_trace_in_a_directory_and_in_an_archive(tmp_path):
    with tarfile.open(SESSIONS) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
        with tarfile.open(tmp_path / "again.tar.gz", "w:gz") as again:
            again.add(tmp_path / "unpacked", "unpacked")
            link = tarfile.TarInfo("unpacked/link.json")
            link.type, link.linkname = tarfile.SYMTYPE, "../elsewhere"
            again.addfile(link)
    (tmp_path / "unpacked" / "._of_macos.json").write_bytes(b"\0")
    for one in sorted((tmp_path / "unpacked").rglob("[!.]*.json"))[:1]:
        one.with_suffix(".json.gz").write_bytes(gzip.compress(one.read_bytes()))
        one.unlink()
    trace = excerpt(SESSIONS)
    # There are 21 requests of sessions, and 44 of four subagents.
    assert (trace.block_tokens, trace.num_requests) == (64, 21 + 44)
    assert infinite(trace).hit_ratio > 0.8
    assert same(read_trace(tmp_path / "unpacked"), trace)
    assert same(read_trace(tmp_path / "again.tar.gz"), trace)
    assert read_trace(tmp_path / "again.tar.gz").name == "again"


def test_what_is_no_trace_cut_short_not_there_or_empty_is_refused(tmp_path):
    for path in (CONVERSATION, SESSIONS):
        content = path.read_bytes()
        (tmp_path / "short").write_bytes(content[: len(content) // 2])
        with pytest.raises(ConfigError, match=r"is cut short or damaged .*; get the file again"):
            read_trace(tmp_path / "short")
    for content in (b"", b"a,b,c\n1,2,3\n", b"\x00\x01\x02", b"{}"):
        (tmp_path / "what").write_bytes(content)
        with pytest.raises(ConfigError, match=r"no known trace: neither lines of JSON .* Mooncake"):
            read_trace(tmp_path / "what")
    with pytest.raises(ConfigError, match=r"There is no session in .*\.json file"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read \(No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    path = write_lines(tmp_path / "made.jsonl", LINE | {"hash_ids": [], "input_length": 0})
    with pytest.raises(ConfigError, match="nothing to replay"):
        read_trace(path)


def session(
    name: str, *times: float, num_blocks: int = 2, model: str = "a", size: int = 64, **more: str
) -> Session:
    """Return one with requests of the same blocks, at these times."""
    request = {"in": size * num_blocks, "hash_ids": [*range(num_blocks)], "model": model}
    requests = [request | {"t": one} for one in times]
    content = SESSION | {"block_size": size, "requests": requests, **more}
    return read_session(json.dumps(content).encode(), name)


def test_requests_of_subagents_are_made_at_their_times():
    content = b"""{"block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 1.0, "type": "n", "in": 64, "hash_ids": [1], "model": "large"},
        {"t": 2.5, "type": "subagent", "requests": [
            {"t": 0.0, "in": 64, "hash_ids": [7], "model": "small"},
            {"t": 10.0, "in": 64, "hash_ids": [8], "model": "small"}]},
        {"t": 9.0, "type": "s", "in": 64, "hash_ids": [2], "model": "large"}]}"""
    found = read_session(content, "one.json")
    assert [(one["time_s"], list(one["ids"]), one["space"]) for one in found.requests] == [
        (1.0, [1], ("one.json", "large")),
        (2.5, [7], ("one.json", "small")),
        (12.5, [8], ("one.json", "small")),
        (9.0, [2], ("one.json", "large")),
    ]
    assert found.seconds == 12.5
    assert lay_out([found], name="x").times.tolist() == [0.0, 1.5, 8.0, 11.5]


def test_sessions_share_blocks_if_ids_hold_for_all_and_model_and_size_are_one():
    def ids(scope: str, model: str) -> list[int]:
        one = session("a", 0, hash_id_scope=scope)
        other = session("b", 5, hash_id_scope=scope, model=model)
        return list(lay_out([one, other], name="x").ids)

    assert ids("global", model="a") == [0, 1, 0, 1]
    assert ids("global", model="b") == ids("local", model="a") == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="b has blocks of 16 tokens and a of 64; replay them"):
        lay_out([session("a", 0), session("b", 0, size=16)], name="x")


def test_a_session_starts_when_another_one_has_ended():
    sessions = [session(name, 0, 10) for name in "abc"]
    assert lay_out(sessions, name="x", concurrent=1).times.tolist() == [0, 10, 10, 20, 20, 30]
    assert lay_out(sessions, name="x", concurrent=2).times.tolist() == [0, 0, 10, 10, 10, 20]
    assert lay_out(sessions, name="x", concurrent=9).times.tolist() == [0, 0, 0, 10, 10, 10]


def test_the_seed_alone_decides_the_order_of_sessions():
    sessions = [session(str(at), 0, 1 + at, num_blocks=1 + at) for at in range(9)]

    def lengths(seed: int, *, backwards: bool = False) -> list[int]:
        given = sessions[::-1] if backwards else sessions
        return list(np.diff(lay_out(given, name="x", concurrent=1, seed=seed).starts))

    assert lengths(1) == lengths(1, backwards=True)
    assert lengths(1) != lengths(2)


@pytest.mark.parametrize(
    ("given", "spaces", "numbered"),
    [
        ([[90, -7], [90, 2**62], [5]], "aaa", [[0, 1], [0, 2], [3]]),
        ([[1, 2], [1, 3], [1, 2]], "aba", [[0, 1], [2, 3], [0, 1]]),
        ([[1, 2], [3, 2], [1, 2, 1], [2]], "aaaa", [[0, 1], [2, 3], [0, 1, 4], [5]]),
        ([[8, 8, 8], [8, 8]], "aa", [[0, 1, 2], [0, 1]]),
    ],
    ids=["in order of first use", "apart by space", "apart by prefix", "twice in a prompt"],
)
def test_ids_are_numbered(given, spaces, numbered):
    builder = TraceBuilder(name="made", block_tokens=4)
    for at, ids in enumerate(given):
        builder.add(time_s=at, num_tokens=4 * len(ids), ids=ids, space=spaces[at])
    assert paths(builder.build()) == numbered


def test_requests_are_put_in_the_order_of_time_from_0_on_and_hit_tokens_end_with_the_prompt():
    builder = TraceBuilder(name="made", block_tokens=4)
    for time_s, num_tokens, ids in ((7.0, 5, [1]), (3.0, 6, [2, 9]), (7.0, 7, [3]), (5.5, 9, [4])):
        builder.add(time_s=time_s, num_tokens=num_tokens, ids=ids)
    trace = builder.build()
    assert trace.times.tolist() == [0.0, 2.5, 4.0, 4.0]
    assert trace.num_tokens.tolist() == [6, 9, 5, 7]
    assert paths(trace) == [[0, 1], [2], [3], [4]]
    assert trace.hit_tokens(np.array([2, 1, 0, 1])) == 6 + 4 + 0 + 4
    assert trace.prompt_tokens == 27
