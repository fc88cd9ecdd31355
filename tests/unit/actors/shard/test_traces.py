"""Which trace an engine's notes belong to."""

import time

import pytest
from opentelemetry.trace import StatusCode

from kvray.actors.shard import traces as module
from kvray.actors.shard.traces import Traces
from kvray.actors.staging.replicas import Origin
from kvray.errors import ConfigError
from kvray.trace.span_note import SPAN_NOTES_MAX, SpanNote, read_notes
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.tracing import CALLER, TRACE, Spans, parent_of, sdk, trace_of

__all__ = ["sdk"]

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
LEADER, RANK, OTHER = (
    Origin(replica=replica, rank=rank, namespace=NAMESPACE)
    for replica, rank in (("r", 0), ("r", 1), ("other", 0))
)


def traceparent(number: int) -> str:
    return f"00-{number:032x}-{CALLER}-01"


def promise(request_id: int, key: bytes = KEY, *, ended: float | None = None) -> SpanNote:
    ended = time.time() if ended is None else ended
    return SpanNote("promise", request_id, ended - 0.1, ended, {"kvray.tokens.prompt": 9}, key)


def load(request_id: int) -> SpanNote:
    return SpanNote("load", request_id, 1.0, 2.0, {"kvray.bytes": 5})


def traced(sdk: Spans, name: str) -> list[int]:
    return [int(trace_of(one), 16) for one in sdk.named(name)]


def test_a_request_is_known_by_its_prompt_and_its_load_by_the_request(sdk: Spans) -> None:
    traces = Traces()
    traces.expect("r", KEY, f"00-{TRACE}-{CALLER}-01")
    assert traces.of_prompt("r", KEY) == f"00-{TRACE}-{CALLER}-01"
    traces.note(LEADER, [promise(7), load(7)])
    traces.note(RANK, [load(7)])
    assert {parent_of(one) for one in (*sdk.named("promise"), *sdk.named("load"))} == {CALLER}
    assert [one.attributes["kvray.rank"] for one in sdk.named("load")] == [0, 1]
    assert dict(sdk.one("promise").attributes) == {
        "kvray.replica": "r",
        "kvray.rank": 0,
        "kvray.request.id": 7,
        "kvray.tokens.prompt": 9,
    }
    assert traces.of_prompt("r", KEY) == ""


def test_of_equal_prompts_the_first_is_meant_first(sdk: Spans) -> None:
    traces = Traces()
    for number in (1, 2):
        traces.expect("r", KEY, traceparent(number))
    traces.note(LEADER, [promise(7), promise(8), promise(9), promise(7)])
    assert traced(sdk, "promise") == [1, 2, 1]


def test_a_request_that_came_before_is_not_taken_for_one_that_is_told_of(sdk: Spans) -> None:
    traces, before = Traces(), time.time() - 1
    traces.expect("r", KEY, traceparent(1))
    traces.note(LEADER, [promise(7, ended=before), promise(8, OTHER_KEY), load(7), promise(9)])
    traces.note(OTHER, [promise(9)])
    assert traced(sdk, "promise") == [1]
    assert traced(sdk, "load") == []


def test_a_rank_that_reports_before_its_leader_is_heard_later(sdk: Spans) -> None:
    traces = Traces()
    traces.expect("r", KEY, traceparent(1))
    traces.note(RANK, [load(7)])
    assert traced(sdk, "load") == []
    traces.note(LEADER, [promise(7)])
    assert traced(sdk, "load") == [1]
    traces.note(LEADER, [])
    assert traced(sdk, "load") == [1]


def test_a_number_that_is_used_again_is_another_request(sdk: Spans) -> None:
    traces = Traces()
    traces.expect("r", KEY, traceparent(1))
    traces.note(LEADER, [promise(7)])
    traces.note(LEADER, [promise(7, OTHER_KEY), load(7)])
    assert traced(sdk, "promise") == [1]
    assert traced(sdk, "load") == []


def test_a_load_that_failed_says_so(sdk: Spans) -> None:
    traces = Traces()
    traces.expect("r", KEY, traceparent(1))
    traces.note(LEADER, [promise(7), load(7)._replace(error="CorruptBlock")])
    assert sdk.one("load").status.status_code is StatusCode.ERROR


def test_what_never_comes_is_forgotten(sdk: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROMPTS_MAX", 8)
    monkeypatch.setattr(module, "_REQUESTS_MAX", 8)
    traces = Traces()
    for number in range(100):
        traces.expect("r", b"%032d" % number, traceparent(number + 1))
        traces.note(LEADER, [promise(number, b"%032d" % number), load(1000 + number)])
        traces.expect("r", b"x%031d" % number, traceparent(number + 1))
    assert len(traces._expected) == len(traces._requests) == 8
    assert len(traces._late) <= module._LATE_MAX
    for _ in range(1000):
        traces.expect("r", KEY, traceparent(1))
    assert len(traces._expected["r", KEY]) == module._ALIKE_MAX
    monkeypatch.setattr(module, "_EXPECTED_S", -1.0)
    assert traces.of_prompt("r", KEY) == ""
    assert ("r", KEY) not in traces._expected


def test_a_broken_note_costs_itself() -> None:
    good = promise(7)
    for bad in (
        5,
        [],
        list(good._replace(request_id=-1)),
        list(good._replace(began=float("nan"))),
        list(good._replace(ended=1e300)),
        list(good._replace(attributes={"x" * 65: 1})),
        list(good._replace(attributes={str(n): n for n in range(17)})),
        list(good._replace(attributes={"x": [1]})),
        ["ingress", *good[1:]],
    ):
        assert read_notes([bad, list(good)]) == [good]


def test_what_is_no_list_of_notes_is_refused() -> None:
    for notes in (5, "text", [list(promise(7))] * (SPAN_NOTES_MAX + 1)):
        with pytest.raises(ConfigError):
            read_notes(notes)
