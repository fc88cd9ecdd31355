"""An engine that asks again is never held up while the shard stages blocks for it."""

import threading
import time
from typing import Any

import pytest

from tests.unit.engine.apart import BLOCK, Apart
from tests.unit.engine.conftest import MakeEngine
from tests.unit.node.stage_server import StageServer
from tests.waiting import HANG_S, wait_for

PROMPT = list(range(100, 140))
NUM_WANTED = (len(PROMPT) - 1) // BLOCK
SOON_S = 1.0


@pytest.fixture
def engine(server: StageServer, make_engine: MakeEngine) -> Apart:
    made = make_engine()
    wait_for(lambda: made.leader.shared.may_stage, "hearing of other nodes")
    return made


def asked(engine: Apart, number: int = 7) -> int:
    """Ask until there is an answer."""
    answers: list[int] = []

    def has_answered() -> bool:
        began = time.monotonic()
        answer = engine.ask(number, PROMPT)
        assert time.monotonic() - began < SOON_S
        answers.extend([] if answer is None else [answer])
        return answer is not None

    wait_for(has_answered, "an answer")
    return answers[0]


def test_it_is_promised_what_was_staged_meanwhile(
    engine: Apart, server: StageServer, make_engine: MakeEngine
) -> None:
    go_on = threading.Event()
    other = make_engine(block_reuse=False)  # it asks for nothing: another node

    def stage(request: dict[str, Any]) -> dict[str, Any]:
        assert go_on.wait(HANG_S)
        other.serve(PROMPT)
        return {"num_blocks": NUM_WANTED, "reason": "none"}

    server.answer = stage
    assert [engine.ask(7, PROMPT) for _ in range(3)] == [None] * 3
    go_on.set()
    assert asked(engine) == NUM_WANTED * BLOCK
    assert len(server.asked) == 1
    totals = engine.leader.shared.figures.totals
    assert totals["stage_calls"] == 1
    assert totals["staged_tokens"] == NUM_WANTED * BLOCK


def test_it_is_asked_in_the_leader_s_own_name(engine: Apart, server: StageServer) -> None:
    assert asked(engine) == 0
    (request,) = server.asked
    assert (request["replica"], request["rank"]) == (engine.leader.shared.pool.replica, 1)


def test_a_shard_that_does_not_answer_is_waited_for_no_longer_than_said(
    server: StageServer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0.3")
    silence = threading.Event()
    server.answer = lambda _: {"late": silence.wait(10)}
    engine = make_engine()
    wait_for(lambda: engine.leader.shared.may_stage, "hearing of other nodes")
    began = time.monotonic()
    assert asked(engine) == 0
    assert time.monotonic() - began < 5
    silence.set()


def test_a_request_that_ends_meanwhile_is_forgotten(engine: Apart, server: StageServer) -> None:
    go_on = threading.Event()
    server.answer = lambda _: {"num_blocks": 0, "reason": "not_stored", "_": go_on.wait(10)}
    assert engine.ask(7, PROMPT) is None
    engine.leader.finish(7)
    assert not engine.leader.finder.is_pending(7)
    assert 7 not in engine.leader.states
    go_on.set()
