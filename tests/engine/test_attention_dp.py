"""With attention data parallelism each rank serves requests of its own, as one rank alone would."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.reference.engine import ReferenceEngine
from tests.engine import fake_connector
from tests.engine.conftest import check, make_prompt
from tests.engine.fake_connector import State, journal_path
from tests.engine.test_tensor_parallel import PROMPTS, SOON_S, start
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[ReferenceEngine]:
    """Two owners that take turns."""
    with start(2, enable_attention_dp=True, overlap=True, runtime="main") as made:
        yield made


@pytest.fixture
def state(engine: ReferenceEngine) -> State:
    """The record of the connector of rank 0."""
    return fake_connector.state


def test_owners_answer_as_one_engine_does(engine, expected):
    for _ in range(2):
        check(engine.generate(PROMPTS, max_tokens=20), expected, PROMPTS, 20)
    assert engine.cache.get_num_free_blocks() == 16


def test_each_owner_has_whole_attention_and_both_halves_of_the_connector(engine, directory):
    assert engine.cache.geometry.num_kv_heads == 2
    for rank in (0, 1):
        calls = journal_path(directory, rank).read_text().split()
        assert {"scheduler", "worker", "wait_for_initialization"} <= set(calls)


def test_each_owner_is_told_its_number_and_of_its_own_requests_only(engine, state):
    """Rank 0 runs dummies beside the others' requests, and its connector hears of none."""
    state.outputs.clear()
    pending = [engine.submit(make_prompt(40, seed=seed), max_tokens=4) for seed in (3, 4, 5)]
    for one in pending:
        one.result(SOON_S)
    own = {one.call_id for one in pending if one.call_id % 2 == 1}
    seen = {
        data.request_id
        for output in state.outputs
        for data in output.new_requests + output.cached_requests
    }
    assert seen == own
    assert {output.attention_dp_rank for output in state.outputs} == {0}


def test_idle_owner_passes_dummies_that_reach_no_connector(engine, state):
    def submit() -> int:
        pending = engine.submit(make_prompt(20, seed=6), max_tokens=6)
        pending.result(SOON_S)
        return pending.call_id

    if submit() % 2 == 0:
        submit()
    state.outputs.clear()
    state.calls.clear()
    assert submit() % 2 == 0
    wait_for(lambda: "wait_for_save" in state.names())
    assert all(not output.new_requests + output.cached_requests for output in state.outputs)
    assert not {"get_num_new_matched_tokens", "request_finished"} & set(state.names())
    assert engine.cache.get_num_free_blocks() == 16


def test_request_is_cancelled_at_its_owner(engine):
    doomed = [engine.submit(make_prompt(60, seed=7), max_tokens=190) for _ in range(2)]
    for one in doomed:
        engine.cancel(one)
    assert [one.result(SOON_S).finish_reason for one in doomed] == ["cancelled"] * 2


def test_idle_engine_notices_that_an_owner_was_killed(directory):
    with start(2, enable_attention_dp=True) as engine:
        time.sleep(0.1)
        os.kill(engine.rank_pids[0], signal.SIGKILL)
        wait_for(lambda: engine.failure is not None)
        with pytest.raises(KVRayError, match=r"Rank 1 .*was killed by SIGKILL"):
            engine.generate([1])
    assert not psutil.pid_exists(engine.rank_pids[0])


def test_connector_that_does_not_say_it_does_attention_dp_is_refused(directory):
    with pytest.raises(ConfigError, match="supports_attention_dp = True"):
        start(1, enable_attention_dp=True, connector=fake_connector.CONFIG)


def test_one_owner_is_an_engine_of_one_rank(expected, directory):
    with start(1, enable_attention_dp=True) as engine:
        assert engine.generate(PROMPTS[0], max_tokens=5).token_ids == expected(PROMPTS[0], 5)
    assert {output.attention_dp_rank for output in fake_connector.state.outputs} == {0}
