"""Whatever comes through a shard's socket, it is answered or hung up on, and the shard lives on."""

import contextlib
import socket
import tempfile
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
from kvray.errors import KVRayError
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from kvray.trace.request_note import RequestNote, pack
from tests.examples import examples
from tests.unit.actors.small_shard import NAMESPACE, WAIT_S, settings_for, wait_until_serving
from tests.unit.mutations import changed_bytes
from tests.unit.store.invariants import check_invariants
from tests.waiting import wait_for

fuzzed = settings(
    max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    with contextlib.closing(ShardSocket(Path(shard.status()["directory"]))) as made:
        yield made


@contextlib.contextmanager
def stranger(shard: Shard) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(WAIT_S)
        peer.connect(shard.status()["directory"] + "/socket")
        yield peer


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


def test_each_request_that_there_is_is_tried_and_is_right_where_nothing_is_changed(engine, shard):
    assert GOOD.keys() == EngineRequests.handlers(EngineRequests.__new__(EngineRequests)).keys()
    for op, fields in GOOD.items():
        assert said(engine, {"op": op, **fields}) == "", op


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
    with stranger(shard) as peer, contextlib.suppress(ConnectionError):
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
    directory = Path(shard.status()["directory"])

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
    with stranger(shard) as peer:
        peer.sendall(wire.encode(message))
        head = peer.recv(wire.LENGTH.size, socket.MSG_WAITALL)
        body = peer.recv(wire.body_length(head), socket.MSG_WAITALL)
        assert isinstance(wire.decode(body)["ok"], bool)
