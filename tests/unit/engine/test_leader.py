"""A leader asks again without being held up, and measures the speed of its engine."""

import threading
import time
from typing import Any

import pytest

from kvray.engine.leader import PrefillRate
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


def run(rate: PrefillRate, *passes: tuple[set[int], int, float], at: float = 100.0) -> float:
    """Plan `passes` of (requests, tokens, seconds until the next)."""
    for requests, tokens, seconds in passes:
        rate.plan(requests, tokens, at)
        at += seconds
    return at


def test_nothing_is_known_at_first() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    run(rate, ({1}, 4000, 0.5))
    assert rate.tokens_per_s == 0.0


def test_a_large_pass_is_measured_until_the_next_is_planned() -> None:
    rate = PrefillRate()
    run(rate, ({1}, 4000, 0.5), ({1}, 1, 0.01), ({1}, 1, 0.01))
    assert rate.tokens_per_s == pytest.approx(8000)


def test_of_an_engine_that_overlaps_the_time_shows_one_pass_later() -> None:
    rate = PrefillRate()
    run(rate, ({1}, 4000, 0.001), ({1}, 1, 0.5), ({1}, 1, 0.01), ({1}, 1, 0.01))
    assert rate.tokens_per_s == pytest.approx(8000)


def test_chunks_of_one_prompt_are_measured_each() -> None:
    rate = PrefillRate()
    run(rate, *[({1}, 1000, 0.1)] * 5)
    assert rate.tokens_per_s == pytest.approx(10_000)


def test_time_in_which_the_engine_had_nothing_to_do_does_not_count() -> None:
    rate = PrefillRate()
    at = run(rate, ({1}, 4000, 0.5), ({1}, 1, 0.01), ({1}, 1, 60.0))
    at = run(rate, ({2}, 4000, 30.0), at=at)
    run(rate, ({3}, 4000, 0.5), ({3}, 1, 0.01), ({3}, 1, 0.01), at=at)
    assert rate.tokens_per_s == pytest.approx(8000)


def test_small_passes_say_nothing() -> None:
    rate = PrefillRate()
    run(rate, *[({1}, 1, 0.02)] * 9)
    assert rate.tokens_per_s == 0.0


def test_a_change_of_speed_is_noticed() -> None:
    rate = PrefillRate()
    at = run(rate, *[({1}, 1000, 0.1)] * 20)
    run(rate, *[({1}, 1000, 1.0)] * 20, at=at)
    assert rate.tokens_per_s == pytest.approx(1000, rel=0.1)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    rate = PrefillRate()
    run(rate, *[({1}, 1000, 0.0)] * 4)
    assert rate.tokens_per_s == 0.0
