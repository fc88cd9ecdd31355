"""An engine of several ranks answers as one of one rank, and ends as a whole when a rank ends."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.reference.engine import ReferenceEngine
from tests.engine import conftest, fake_connector
from tests.engine.conftest import BLOCK, check, make_prompt, wait_for_the_end_of_its_child
from tests.engine.fake_connector import CONFIG, State, journal_path
from tests.waiting import wait_for

SOON_S = 30.0
PROMPTS = [make_prompt(100), make_prompt(96), make_prompt(50), make_prompt(70, seed=1), [7]]
LEADERS_OWN = {
    "scheduler",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "wait_for_initialization",
}


def start(size: int, model: str | Path = "tiny", **options: Any) -> ReferenceEngine:
    """Return an engine of so many ranks; the record of the leader's connector is empty."""
    fake_connector.reset()
    defaults: dict[str, Any] = {"num_blocks": 16, "num_threads": 1, "connector": CONFIG}
    return conftest.start(model, tensor_parallel_size=size, **{**defaults, **options})


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[ReferenceEngine]:
    """Two ranks with small pools."""
    with start(2) as made:
        yield made


@pytest.fixture
def state() -> Iterator[State]:
    """The settings and the record of the leader's connector."""
    yield fake_connector.state
    fake_connector.state.is_async_save = False


def test_ranks_answer_as_one_does_each_with_its_heads(engine, expected):
    assert engine.cache.geometry.num_kv_heads == 1
    for _ in range(2):
        check(engine.generate(PROMPTS, max_tokens=20), expected, PROMPTS, 20)
    assert engine.cache.get_num_free_blocks() == 16


def test_cancelled_request_ends_on_every_rank(engine, expected):
    doomed = engine.submit(make_prompt(60, seed=2), max_tokens=100)
    assert engine.generate(make_prompt(20), max_tokens=3).token_ids == expected(make_prompt(20), 3)
    engine.cancel(doomed)
    assert doomed.result(SOON_S).finish_reason == "cancelled"
    assert engine.cache.get_num_free_blocks() == 16


def test_all_workers_are_called_alike_and_the_scheduler_on_the_leader_alone(
    engine, state, directory
):
    engine.generate(make_prompt(40, seed=2), max_tokens=5)

    def calls(rank: int) -> list[str]:
        names = journal_path(directory, rank).read_text().split()
        return [name for name in names if rank or name not in LEADERS_OWN]

    wait_for(lambda: calls(1) == calls(0))
    assert "get_finished" in calls(1)


def test_save_holds_the_blocks_on_every_rank_until_it_has_ended_on_all(engine, state, expected):
    state.is_async_save = True
    prompts = [make_prompt(100, seed=seed) for seed in (6, 7, 6)]
    for prompt in prompts:
        assert engine.generate(prompt, max_tokens=10).token_ids == expected(prompt, 10)
    assert engine.cache.get_num_free_blocks() >= 16 - 7


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_is_killed_or_frozen_ends_the_engine_with_a_sentence(directory, signum):
    with start(2, collective_timeout_s=4.0) as engine:
        engine.generate(make_prompt(20), max_tokens=1)
        pending = engine.submit(make_prompt(60), max_tokens=190)
        os.kill(engine.rank_pids[0], signum)
        told = "was killed by SIGKILL" if signum == signal.SIGKILL else "in vain"
        with pytest.raises(KVRayError, match=rf"dead: .*{told}.*Restart the engine"):
            pending.result(SOON_S)
        with pytest.raises(KVRayError, match="dead"):
            engine.submit([1])
    assert not any(psutil.pid_exists(pid) for pid in engine.rank_pids)


@pytest.mark.parametrize("name", ["register_kv_caches", "wait_for_save"])
def test_error_of_one_rank_is_told_by_all(directory, name):
    (directory / "fail-1").write_text(name)
    try:
        with pytest.raises(KVRayError, match=rf"Rank 1 .*told to fail in {name}"):
            with start(2) as engine:
                engine.generate(make_prompt(20), max_tokens=1)
    finally:
        (directory / "fail-1").unlink()


def test_ranks_end_with_their_leader():
    code = f"""
import time
from kvray.reference.engine import ReferenceEngine
engine = ReferenceEngine("tiny", tokens_per_block={BLOCK}, num_blocks=16, num_threads=1,
                         tensor_parallel_size=2)
print(*engine.rank_pids, flush=True)
time.sleep(60)
"""
    wait_for_the_end_of_its_child(code)


# With attention data parallelism each rank serves requests of its own, as one rank alone would.


@pytest.fixture(scope="module")
def owners(directory: Path) -> Iterator[ReferenceEngine]:
    """Two owners that take turns, whose journals are apart."""
    (directory / "owners").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fake_connector.DIRECTORY_VARIABLE, str(directory / "owners"))
        with start(2, enable_attention_dp=True, overlap=True, runtime="main") as made:
            yield made


def test_owners_answer_as_one_engine_does_each_with_all_heads(owners, expected):
    assert owners.cache.geometry.num_kv_heads == 2
    for _ in range(2):
        check(owners.generate(PROMPTS, max_tokens=20), expected, PROMPTS, 20)
    assert owners.cache.get_num_free_blocks() == 16


def test_each_owner_is_told_its_number_and_of_its_own_requests_only(owners, state):
    """Rank 0 runs dummies beside the others' requests, and its connector hears of none."""
    state.outputs.clear()
    pending = [owners.submit(make_prompt(40, seed=seed), max_tokens=4) for seed in (3, 4, 5)]
    for one in pending:
        one.result(SOON_S)
    own = {one.call_id for one in pending if one.call_id % 2 == 1}
    assert {data.request_id for data in state.reported()} == own
    assert {output.attention_dp_rank for output in state.outputs} == {0}


def test_idle_owner_passes_dummies_that_reach_no_connector(owners, state):
    def submit() -> int:
        pending = owners.submit(make_prompt(20, seed=6), max_tokens=6)
        pending.result(SOON_S)
        return pending.call_id

    if submit() % 2 == 0:
        submit()
    state.outputs.clear()
    state.calls.clear()
    assert submit() % 2 == 0
    wait_for(lambda: "wait_for_save" in state.names())
    assert state.reported() == []
    assert not {"get_num_new_matched_tokens", "request_finished"} & set(state.names())
    assert owners.cache.get_num_free_blocks() == 16


def test_request_is_cancelled_at_its_owner(owners):
    doomed = [owners.submit(make_prompt(60, seed=7), max_tokens=190) for _ in range(2)]
    for one in doomed:
        owners.cancel(one)
    assert [one.result(SOON_S).finish_reason for one in doomed] == ["cancelled"] * 2


def test_idle_engine_notices_that_an_owner_was_killed(directory):
    with start(2, enable_attention_dp=True) as engine:
        time.sleep(0.1)
        os.kill(engine.rank_pids[0], signal.SIGKILL)
        wait_for(lambda: engine.failure is not None)
        with pytest.raises(KVRayError, match=r"Rank 1 .*was killed by SIGKILL"):
            engine.generate([1])
    assert not psutil.pid_exists(engine.rank_pids[0])


def test_one_owner_is_an_engine_of_one_rank_whose_connector_must_say_it_does_attention_dp(
    expected, directory, monkeypatch
):
    with start(1, enable_attention_dp=True) as engine:
        assert engine.generate(PROMPTS[0], max_tokens=5).token_ids == expected(PROMPTS[0], 5)
    assert {output.attention_dp_rank for output in fake_connector.state.outputs} == {0}
    monkeypatch.setattr(fake_connector.Worker, "supports_attention_dp", False)
    with pytest.raises(ConfigError, match="supports_attention_dp = True"):
        start(1, enable_attention_dp=True)
