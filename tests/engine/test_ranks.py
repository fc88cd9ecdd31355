"""An engine of several ranks answers as one of one rank, and ends as a whole when a rank ends."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray.errors import KVRayError
from kvray.reference.engine import ReferenceEngine
from tests.engine import fake_connector
from tests.engine.conftest import BLOCK, check, make_prompt, wait_for_the_end_of_its_child
from tests.engine.fake_connector import RANK_CONFIG, State, journal_path
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


def start(size: int, **options: Any) -> ReferenceEngine:
    """Return an engine of so many ranks; the record of the leader's connector is empty."""
    fake_connector.reset()
    defaults: dict[str, Any] = {
        "tokens_per_block": BLOCK,
        "num_blocks": 16,
        "num_threads": 1,
        "poison": True,
        "connector": RANK_CONFIG,
    }
    return ReferenceEngine("tiny", tensor_parallel_size=size, **{**defaults, **options})


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[ReferenceEngine]:
    """Two ranks with small pools."""
    with start(2) as made:
        yield made


@pytest.fixture
def state(engine: ReferenceEngine) -> Iterator[State]:
    """The settings of the leader's half."""
    yield fake_connector.state
    fake_connector.state.is_async_save = False


def test_ranks_answer_as_one_does(engine, state, expected):
    for _ in range(2):
        check(engine.generate(PROMPTS, max_tokens=20), expected, PROMPTS, 20)
    assert engine.cache.get_num_free_blocks() == 16


def test_each_rank_holds_its_heads_in_a_pool_of_its_own(engine):
    assert engine.cache.geometry.num_kv_heads == 1
    assert engine.llm_args.tensor_parallel_size == 2
    assert engine.llm_args.parallel_config.to_mapping().rank == 0
    assert len(engine.rank_pids) == 1


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


def test_cancelled_request_ends_on_every_rank(engine, state, expected):
    doomed = engine.submit(make_prompt(60, seed=2), max_tokens=100)
    assert engine.generate(make_prompt(20), max_tokens=3).token_ids == expected(make_prompt(20), 3)
    engine.cancel(doomed)
    assert doomed.result(SOON_S).finish_reason == "cancelled"
    assert engine.cache.get_num_free_blocks() == 16


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
