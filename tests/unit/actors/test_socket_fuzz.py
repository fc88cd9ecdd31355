"""Whatever comes through a shard's socket, it is answered or hung up on, and the shard lives on.

If a process sends it without end, those who behave are served, and memory is flat.
"""

import contextlib
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray import wire
from kvray.actors.shard.engine_requests import EngineRequests
from kvray.actors.shard.shard import Shard
from kvray.errors import ConfigError, KVRayError
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from kvray.trace.request_note import NOTES_MAX, RequestNote, pack
from tests.examples import examples
from tests.far import Far
from tests.unit.actors.small_shard import NAMESPACE, WAIT_S, Line, settings_for, wait_until_serving
from tests.unit.mutations import changed_bytes
from tests.unit.store.invariants import check_invariants
from tests.waiting import wait_for

fuzzed = settings(
    max_examples=examples(80),
    # The first text that is drawn has all characters sorted, which is slow on a starved machine.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats()),
        *(st.text(max_size=20), st.binary(max_size=70), st.just(bytes(64))),
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)
RANK = {"replica": "r", "rank": 0}
GOOD: dict[str, dict[str, Any]] = {
    "hello": {},
    "register": {**RANK, "namespace": NAMESPACE.to_wire(), "wanted": [[0, None]], "num_ranks": 1}
    | {"holder": ["0" * 16, 0, 1], "adapters": "x", "tenants": "0" * 16},
    "report": {**RANK, "counters": {"requests": 1}, "requests": [], "leaving": False},
    "describe": {**RANK, "chains": []},
    "stage": {**RANK, "keys": bytes(64), "wait_s": 0.0, "tokens_per_s": 1.0}
    | {"verify_from": 0, "token": "t", "unread": []},
}
OF_OTHERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    wire.LENGTH.pack(2**32 - 1),
    wire.LENGTH.pack(5) + b"\xc1" * 5,
    wire.LENGTH.pack(3) + b"\x93\x01\x02",
]
"""HTTP, a frame that is too large, one that is no msgpack, and half a list."""
FRAMES = [wire.encode({"op": op, **fields}) for op, fields in GOOD.items()]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that are right but for some of their fields."""
    op = draw(st.sampled_from(sorted(GOOD)))
    fields = dict(GOOD[op])
    for name in draw(st.lists(st.sampled_from([*fields, "more"]), max_size=3)):
        if draw(st.booleans()):
            fields[name] = draw(VALUES)
        else:
            fields.pop(name, None)
    if op == "register" and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(NAMESPACE.to_wire())))
        fields["namespace"] = {**NAMESPACE.to_wire(), name: draw(VALUES)}
    return {"op": op, **fields}


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as parent:
        shard = Shard("s", settings_for(Path(parent) / "node"))
        shard.start()
        wait_until_serving(shard)
        yield shard
        shard.stop(retire=True, timeout_s=10)


@pytest.fixture
def engine(shard: Shard) -> Iterator[ShardSocket]:
    with contextlib.closing(ShardSocket(directory_of(shard))) as made:
        yield made


def directory_of(shard: Shard) -> Path:
    return Path(shard.status()["directory"])


def stranger(directory: Path, timeout_s: float = WAIT_S) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(timeout_s)
    peer.connect(str(directory / wire.SOCKET_FILE))
    return peer


def ask(peer: socket.socket, /, **request: Any) -> bytes:
    peer.sendall(wire.encode(request))
    length = wire.body_length(peer.recv(wire.LENGTH.size, socket.MSG_WAITALL).ljust(4, b"\0"))
    return peer.recv(length, socket.MSG_WAITALL)


def serves(engine: ShardSocket) -> bool:
    return bool(engine.call("hello", timeout_s=WAIT_S)["shard"] == "s")


def said(engine: ShardSocket, request: dict[str, Any]) -> str:
    """Return the sentence of the error that a request was answered with, if it was one."""
    try:
        engine.call(**request, timeout_s=WAIT_S)
    except KVRayError as error:
        return str(error)
    return ""


@fuzzed
@given(asked=st.lists(requests(), min_size=1, max_size=4))
def test_a_request_of_any_fields_is_answered(engine, shard, asked):
    for request in asked:
        assert "did not answer" not in said(engine, request), "it hung up: a defect"
    assert serves(engine)
    assert shard.status()["state"] == "serving"


BAD: dict[str, list[dict[str, Any]]] = {
    "nonsense": [{}],
    "x" * 100_000: [{}],
    "hello": [{"extra": 1}, {"connection": 1}],
    "register": [
        {"replica": ["x"]},
        {"replica": "x", "namespace": 5},
        {"replica": "x", "namespace": {"model": None}},
        {"replica": "x", "namespace": NAMESPACE.to_wire() | {"model": 5}},
    ],
    "stage": [
        *({"keys": keys} for keys in (b"", bytes(33))),
        *({"wait_s": wait_s} for wait_s in ("soon", -1)),
        {"replica": "none"},
    ],
    "report": [{"counters": "ab"}],
}
"""Fields that are changed, request by request."""


def test_each_request_that_there_is_is_tried_and_refused_where_something_is_wrong(engine, shard):
    assert GOOD.keys() == EngineRequests.handlers(EngineRequests.__new__(EngineRequests)).keys()
    for op, fields in GOOD.items():
        assert said(engine, {"op": op, **fields}) == "", op
    for op, wrong in [(op, one) for op, some in BAD.items() for one in some]:
        with pytest.raises(ConfigError):
            engine.call(op, timeout_s=WAIT_S, **{**GOOD.get(op, {}), **wrong})
    told = engine.call("report", timeout_s=WAIT_S, **GOOD["report"])
    assert (told["known"], told["peers"]) == (True, False)
    assert "x" not in [entry["replica"] for entry in shard.status()["replicas"]]


@fuzzed
@given(
    sent=st.binary(max_size=200)
    | st.sampled_from(OF_OTHERS)
    | st.lists(
        st.sampled_from(FRAMES).flatmap(lambda frame: changed_bytes(frame) | st.just(frame)),
        min_size=1,
        max_size=4,
    ).map(b"".join),
    piece=st.integers(1, 400),
    reads=st.booleans(),
)
def test_bytes_of_any_kind_are_answered_or_hung_up_on(engine, shard, sent, piece, reads):
    """They come in pieces of any size, and their sender reads to the end or goes without a word."""
    with stranger(directory_of(shard)) as peer, contextlib.suppress(ConnectionError):
        for start in range(0, len(sent), piece):
            peer.sendall(sent[start : start + piece])
        if reads:
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):  # raises if nobody hangs up
                pass
    assert serves(engine)


def test_who_has_gone_leaves_nothing_behind(engine, shard):
    """After all that was sent above."""
    assert serves(engine)
    directory = directory_of(shard)

    def is_alone() -> bool:
        """Return whether there is the listener, and this engine's connection: both are ours."""
        ours = psutil.Process().net_connections("unix")
        return len([one for one in ours if one.laddr == str(directory / "socket")]) <= 2

    wait_for(is_alone, "the end of connections")
    with contextlib.closing(Arena(directory, lock_wait_s=1.0)) as arena:
        check_invariants(arena.tables)


def test_a_bad_note_in_a_report_costs_nothing_but_itself(engine, shard, caplog):
    engine.call("register", timeout_s=WAIT_S, **GOOD["register"])
    good = RequestNote(77, 1.0, 40, 4, 0, 0, 9, "not_stored")
    notes = [pack(good._replace(request_id=78, wanted=-1)), b"junk", None, pack(good)]
    told = {**RANK, "counters": {"requests": 5}, "requests": notes, "prompts": b"no sample"}
    assert engine.call("report", timeout_s=WAIT_S, **told)["known"] is True
    found = {one.note.request_id for one in shard.requests.asked("r", None, 9)}
    assert found & {77, 78} == {77}
    (rank,) = (one for one in shard.status()["replicas"] if one["connected"])
    assert rank["counters"] == {"requests": 5}
    assert "4 notes of replica 'r'" in caplog.text


@fuzzed
@given(message=st.dictionaries(st.text(max_size=9) | st.just("op"), VALUES, max_size=5))
def test_a_message_of_any_kind_is_answered(shard, message):
    with stranger(directory_of(shard)) as peer:
        assert isinstance(wire.decode(ask(peer, **message))["ok"], bool)


# -- a siege ---------------------------------------------------------------------------------------

_GROWTH_MAX = 96 * 2**20
"""Bytes between the first and the last look: bounds that fill, and what an allocator keeps."""
_THREADS = 6
_KEYS_MAX = 32_768


class Besieged(Line):
    """A shard in a process of its own; its lookup measures the time between two replies."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._last, self._longest_s = time.monotonic(), 0.0
        self._shard = self.follow(Shard("besieged", settings_for(directory)))
        self._shard.start()
        wait_until_serving(self._shard)
        self._last, self._longest_s = time.monotonic(), 0.0

    async def _ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        reply = await super()._ask(actor, method, *args, timeout_s=timeout_s)
        if method == "delta":
            now = time.monotonic()
            self._longest_s, self._last = max(self._longest_s, now - self._last), now
        return reply

    def look(self) -> tuple[int, float]:
        """Return the bytes of its memory, and the longest time between two heartbeats."""
        self.heard.clear()
        gap_s = max(self._longest_s, time.monotonic() - self._last)
        return psutil.Process().memory_info().rss, gap_s

    def stop(self) -> None:
        self._shard.stop(retire=True, timeout_s=10)


class Besiegers:
    """Threads of another process, which send whatever they can think of until it is killed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._chance = directory, random.Random(seed)
        for _ in range(_THREADS):
            threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        acts = (self.junk, self.halves, self.odd, self.stage, self.large, self.notes, self.crowd)
        while True:
            with contextlib.suppress(OSError, ValueError), self.connected() as peer:
                self._chance.choice(acts)(peer)

    def junk(self, peer: socket.socket) -> None:
        peer.sendall(self._chance.randbytes(self._chance.randrange(4000)))
        peer.recv(1)

    def halves(self, peer: socket.socket) -> None:
        frame = wire.encode({"op": "hello", "more": bytes(self._chance.randrange(300_000))})
        peer.sendall(frame[: self._chance.randrange(len(frame))])
        time.sleep(0.05)

    def odd(self, peer: socket.socket) -> None:
        values = (None, -1, 2**63, 1e308, float("nan"), "[/x]\x1b[2J", b"\0" * 99, [[]], {0: 1})
        names = ("replica", "rank", "namespace", "counters", "requests", "keys", "wait_s", "spans")
        for op in ("register", "report", "stage", "describe", "hello", "other"):
            fields = {one: self._chance.choice(values) for one in self._chance.sample(names, 4)}
            ask(peer, op=op, **fields)

    def stage(self, peer: socket.socket) -> None:
        """Legal, and as large as can be; the answer is not always read."""
        rank = {"replica": f"large-{self._chance.randrange(4)}", "rank": 0}
        keys = os.urandom(32 * self._chance.choice((1, 64, _KEYS_MAX)))
        parts = [[part, None] for part in range(16)]
        ask(peer, op="register", **rank, namespace=NAMESPACE.to_wire(), wanted=parts)
        request = {"op": "stage", **rank, "keys": keys, "wait_s": 0.05}
        for _ in range(3):
            if self._chance.random() < 0.3:
                peer.sendall(wire.encode(request))
            else:
                ask(peer, **request)

    def large(self, peer: socket.socket) -> None:
        item = self._chance.choice((0, b"", [], {}, "x" * 9))
        ask(peer, op="report", replica="r", rank=0, counters=[item] * 16_000)
        peer.sendall(wire.LENGTH.pack(wire.FRAME_MAX) + bytes(self._chance.randrange(2**21)))

    def notes(self, peer: socket.socket) -> None:
        rank = {"replica": f"replica-{self._chance.randrange(10**9)}", "rank": 0}
        note = RequestNote(1, 1.0, 40, 4, 0, 0, 9, "x" * 60)
        ask(peer, op="register", **rank, namespace=NAMESPACE.to_wire())
        for first in range(0, 4000, 200):
            some = [pack(note._replace(request_id=first + one)) for one in range(NOTES_MAX)]
            counters = {f"c{one}-{rank['replica']}": one for one in range(250)}
            ask(peer, op="report", **rank, counters=counters, requests=some)

    def crowd(self, _peer: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(self.connected())

    def connected(self) -> socket.socket:
        return stranger(self._directory, timeout_s=2)


@pytest.mark.parametrize(
    "seconds", [2.0, pytest.param(120.0, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_an_engine_that_behaves_is_served_beside_a_process_that_does_not(directory, seconds):
    with contextlib.ExitStack() as stack:
        shard = Far(f"{__name__}:Besieged", directory)
        stack.callback(shard.kill)
        engine = stack.enter_context(contextlib.closing(ShardSocket(directory)))
        rank = {"timeout_s": WAIT_S, "replica": "good", "rank": 0}
        engine.call("register", **rank, namespace=NAMESPACE.to_wire())
        stack.callback(Far(f"{__name__}:Besiegers", directory, 7).kill)
        count, before = 0, None
        until = time.monotonic() + seconds
        while time.monotonic() < until or count < 10:
            count += 1
            note = pack(RequestNote(count, 1.0, 40, 4, 0, 0, 9, "not_stored"))
            answer = engine.call("report", **rank, counters={"requests": count}, requests=[note])
            assert answer["known"], "its connection was ended"
            if before is None and time.monotonic() > until - 0.8 * seconds:
                before, _ = shard.call("look", timeout_s=WAIT_S)
            time.sleep(0.02)
        after, heartbeat_s = shard.call("look", timeout_s=WAIT_S)
        shard.call("stop", timeout_s=WAIT_S)
    assert after - before < _GROWTH_MAX
    assert heartbeat_s < WAIT_S / 2
