"""Reading a trace, whose content says its format: Mooncake's lines, or agentic sessions."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import heapq
import io
import json
import lzma
import random
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvray.errors import ConfigError
from kvray.store.replay import NO_PARENT, Ints, Trace

CONCURRENT = 16
"""Sessions that run at the same time, by default."""
_MOONCAKE_BLOCK_TOKENS = 512
"""Of the traces that Mooncake published; their files do not say it."""
_LINE_MARK, _SESSION_MARK = b'"hash_ids"', b'"requests"'
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 64 * 1024
_SUFFIXES = (".gz", ".xz", ".tar", ".tgz", ".txz", ".jsonl", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The requests of one user, with those of the subagents that they started."""

    name: str
    block_tokens: int
    requests: Sequence[dict[str, Any]]
    """Arguments of `TraceBuilder.add`; times count from the session's start."""

    @property
    def seconds(self) -> float:
        """From its start to its last request."""
        return max((request["time_s"] for request in self.requests), default=0.0)


def read_session(content: bytes, where: str) -> Session:
    """Return the session in a file; ConfigError: it is damaged, and the message names `where`."""
    file = parse(SessionFile, content, where)
    scope = where if file.hash_id_scope == "local" else None
    requests = _requests(file.requests, 0.0, file.block_size, scope, where)
    return Session(name=where, block_tokens=file.block_size, requests=list(requests))


def lay_out(
    sessions: Iterable[Session], *, name: str, concurrent: int = CONCURRENT, seed: int = 0
) -> Trace:
    """Return the trace of users who have one session after the other.

    Sessions do not say when they started. Here `concurrent` users begin at the same time. A user
    begins another session right after the last request of a session. `seed` decides their order.
    ConfigError: there is no session, or their blocks differ in size.
    """
    in_turn = sorted(sessions, key=lambda session: session.name)
    if not in_turn:
        raise ConfigError(
            f"There is no session in {name}; give the .json file of one, or a directory or an"
            " archive of them."
        )
    first = in_turn[0]
    for session in in_turn:
        if session.block_tokens != first.block_tokens:
            raise ConfigError(
                f"{session.name} has blocks of {session.block_tokens} tokens and {first.name} of"
                f" {first.block_tokens}; replay them apart."
            )
    random.Random(seed).shuffle(in_turn)
    builder = TraceBuilder(name=name, block_tokens=first.block_tokens)
    free_s = [0.0] * concurrent
    for session in in_turn:
        start_s = heapq.heappop(free_s)
        heapq.heappush(free_s, start_s + session.seconds)
        for request in session.requests:
            builder.add(**request | {"time_s": start_s + request["time_s"]})
    return builder.build()


def _requests(
    steps: Sequence[Step], start_s: float, block_tokens: int, scope: str | None, where: str
) -> Iterator[dict[str, Any]]:
    """Return the requests of a session or a subagent, and of the subagents in it."""
    for at, step in enumerate(steps):
        time_s, here = start_s + step.t, f"{where}, requests[{at}]"
        if step.requests is not None:
            yield from _requests(step.requests, time_s, block_tokens, scope, here)
            continue
        check_blocks(len(step.hash_ids), step.num_tokens, block_tokens, here)
        yield {
            "time_s": time_s,
            "num_tokens": step.num_tokens,
            "ids": _packed(step.hash_ids),
            "space": (scope, str(step.model)),
        }


def _packed(ids: Sequence[int]) -> Ints:
    """Return ids of 64 bits, signed or not, in the memory that they need."""
    return np.array([one % 2**64 for one in ids], dtype=np.uint64).view(np.int64)


class TraceBuilder:
    """Takes requests in any order, and makes a trace of them."""

    def __init__(self, *, name: str, block_tokens: int) -> None:
        self._name = name
        self._block_tokens = block_tokens
        # Time, tokens, ids and space of each request.
        self._requests: list[tuple[float, int, Ints, Any]] = []

    def add(
        self, *, time_s: float, num_tokens: int, ids: Sequence[int] | Ints, space: Any = None
    ) -> None:
        """Take a request; equal ids of different `space`s are different blocks."""
        self._requests.append((time_s, num_tokens, np.asarray(ids, dtype=np.int64), space))

    def build(self) -> Trace:
        """Return the trace; equal ids after other blocks are other blocks."""
        requests = sorted(self._requests, key=lambda request: request[0])
        roots: dict[Any, int] = {}
        # (block before, id) -> block; below 0 a space stands for the block before a root.
        blocks: dict[tuple[int, int], int] = {}
        parents: list[int] = []
        depths: list[int] = []
        parts = [np.zeros(0, dtype=np.int64)]
        for _, _, ids, space in requests:
            before = roots.setdefault(space, -1 - len(roots))
            path = []
            for depth, one in enumerate(ids.tolist()):
                block = blocks.setdefault((before, one), len(parents))
                if block == len(parents):
                    parents.append(max(before, NO_PARENT))
                    depths.append(depth)
                path.append(block)
                before = block
            parts.append(np.array(path, dtype=np.int64))
        times = np.array([time_s for time_s, *_ in requests], dtype=np.float64)
        return Trace(
            name=self._name,
            block_tokens=self._block_tokens,
            times=times - times[:1],
            starts=np.cumsum([len(part) for part in parts]),
            ids=np.concatenate(parts),
            num_tokens=np.array([num_tokens for _, num_tokens, *_ in requests], dtype=np.int64),
            parents=np.array(parents, dtype=np.int64),
            depths=np.array(depths, dtype=np.int64),
        )


Time = Annotated[float, Field(ge=0, le=1e13, allow_inf_nan=False)]
_Whole = BeforeValidator(
    lambda given: int(given) if isinstance(given, float) and given.is_integer() else given
)
"""Takes 1024.0 for a number, as tables of numbers write it."""
Count = Annotated[int, _Whole, Field(ge=0, lt=2**63)]
Id = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class MooncakeLine(_Record):
    """One request of a file in FAST25-release/traces of kvcache-ai/Mooncake."""

    timestamp: Time  # milliseconds
    input_length: Count
    hash_ids: list[Id]


class Step(_Record):
    """One request of a session, or a subagent with requests of its own."""

    t: Time
    """Seconds since the start of the session, or of the subagent."""
    num_tokens: Count = Field(alias="in", default=0)
    hash_ids: list[Id] = []
    model: Any = ""
    """Blocks of different models differ, even under equal ids."""
    requests: list[Step] | None = None
    """Of a subagent that started at `t`; None: it is a request."""


class SessionFile(_Record):
    """A traces/trace_NNNN.json of callanjfox/kv-cache-tester."""

    block_size: Annotated[int, _Whole, Field(ge=1, lt=2**63)]
    hash_id_scope: Any = "local"
    requests: list[Step]


R = TypeVar("R", bound=_Record)


def parse(kind: type[R], content: bytes, where: str) -> R:
    """Return the record in `content`; ConfigError: it is damaged, `where` says which one."""
    try:
        return kind.model_validate_json(content.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        wrong = f" is no JSON ({first['ctx']['error']})"
    elif not first["loc"]:
        wrong = " is no JSON object"
    elif first["type"] == "missing":
        wrong = f": {_field(first['loc'])} is missing"
    else:
        shown = json.dumps(first["input"], default=str)[:40]
        complaint = first["msg"].replace("Input should", "must")
        wrong = f": {_field(first['loc'])} {complaint}, and is {shown}"
    raise ConfigError(f"{where}{wrong}; get the file again, or take the record out.")


def check_blocks(
    num_blocks: int, num_tokens: int, block_tokens: int, where: str, *, remedy: str = ""
) -> None:
    """Raise ConfigError if the tokens do not make so many blocks; the last may be partial."""
    if not num_tokens // block_tokens <= num_blocks <= -(-num_tokens // block_tokens):
        raise ConfigError(
            f"{where}: {num_tokens} tokens are not {num_blocks} blocks of {block_tokens} tokens;"
            f" {remedy}get the file again."
        )


def _field(location: tuple[int | str, ...]) -> str:
    """Return a path such as `requests[1].hash_ids`."""
    parts = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in location)
    return "".join(parts).removeprefix(".")


def read_trace(
    path: Path, *, block_tokens: int | None = None, concurrent: int = CONCURRENT, seed: int = 0
) -> Trace:
    """Return the trace in a file or a directory; ConfigError: it cannot be read.

    `path` has Mooncake's JSON lines, or agentic sessions: one file, a directory or a tar archive of
    them. `block_tokens` counts where the file does not say it (None: 512). `concurrent` sessions
    run at once, in an order that `seed` decides.
    """
    name = path.resolve().name
    while name.endswith(_SUFFIXES):  # they say how it is packed
        name = name.rpartition(".")[0]
    if path.is_dir():
        found = list[Session]()
        for one in filter(_is_session, sorted(path.iterdir())):
            with _opened(one) as file:
                found += _sessions_of(file, one)
        trace = lay_out(found, name=name, concurrent=concurrent, seed=seed)
    else:
        with _opened(path) as file:
            head, is_archive = _head(file)
            if _LINE_MARK in head and not (is_archive or _SESSION_MARK in head):
                trace = _read_lines(file, path, name, block_tokens or _MOONCAKE_BLOCK_TOKENS)
            else:
                sessions = _sessions_of(file, path)
                trace = lay_out(sessions, name=name, concurrent=concurrent, seed=seed)
    if not trace.num_refs:
        raise ConfigError(f"No request in {path} has a block; there is nothing to replay.")
    return trace


def _read_lines(lines: Iterable[bytes], path: Path, name: str, block_tokens: int) -> Trace:
    """Return the trace with the request of each line of Mooncake's; empty lines are skipped."""
    builder = TraceBuilder(name=name, block_tokens=block_tokens)
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        here = f"{path}, line {number}"
        line = parse(MooncakeLine, text, here)
        time_s, num_tokens, ids = line.timestamp / 1000, line.input_length, _packed(line.hash_ids)
        remedy = "give the size of the trace's blocks with --block-tokens, or "
        check_blocks(len(ids), num_tokens, block_tokens, here, remedy=remedy)
        builder.add(time_s=time_s, num_tokens=num_tokens, ids=ids)
    return builder.build()


def _sessions_of(file: io.BufferedReader, path: Path) -> Iterator[Session]:
    head, is_archive = _head(file)
    if is_archive:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None and _is_session(Path(member.name)):
                    yield read_session(content.read(), f"{path}: {member.name}")
    elif _SESSION_MARK in head:
        yield read_session(file.read(), str(path))
    else:
        raise ConfigError(
            f"{path} is no known trace: neither lines of JSON with hash_ids, as Mooncake's,"
            " nor a session with requests, nor an archive of sessions."
        )


def _is_session(path: Path) -> bool:
    """Whether a file's name is that of a session; macOS puts a `._` file beside each of its own."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    return name.endswith(".json") and not name.startswith("._")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for the block, unpacked; ConfigError: it is damaged, also later in the block."""
    try:
        with path.open("rb") as raw:
            magic = raw.peek(len(_XZ))
            unpacked: object = raw
            if magic.startswith(_GZIP):
                unpacked = gzip.GzipFile(fileobj=raw)
            elif magic.startswith(_XZ):
                unpacked = lzma.LZMAFile(raw)  # noqa: SIM115 - closes with `raw`
            yield io.BufferedReader(cast(io.RawIOBase, unpacked), buffer_size=_HEAD_BYTES)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
        raise ConfigError(
            f"{path} is cut short or damaged ({str(error).rstrip('.')}); get the file again."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None


def _head(file: io.BufferedReader) -> tuple[bytes, bool]:
    """Return the beginning of a file, and whether it is that of an archive."""
    head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    return head, head[_TAR_AT:].startswith(_TAR)
