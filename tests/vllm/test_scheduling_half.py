"""The scheduler's half alone, with requests and outputs as vLLM makes them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.engine.shared_state import shared_state_for
from kvray.vllm.metadata import PoolMetadata
from kvray.vllm.scheduling import SchedulingHalf
from tests.unit.connector.conftest import environment, running_shard, shard
from tests.unit.engine.apart import ARGS, BLOCK, Apart
from tests.unit.vllm.test_identity import request as request_of

__all__ = ["environment", "running_shard", "shard"]

PROMPT = list(range(100, 140))
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.fixture
def half(shard: Shard) -> Iterator[SchedulingHalf]:
    """A scheduler's half beside an engine that has stored the prompt."""
    stored = Apart()
    made = SchedulingHalf(shared_state_for(object(), ARGS, load_config(None)))
    try:
        stored.serve(PROMPT)
        made.lead(PoolMetadata(facts=stored.facts))
        yield made
    finally:
        made.close()
        stored.close()


def asked(name: str) -> SimpleNamespace:
    return request_of(request_id=name, prompt_token_ids=PROMPT, all_token_ids=PROMPT)


def new(name: str, num_external: int, *, num_scheduled: int) -> SimpleNamespace:
    data = SimpleNamespace(
        req_id=name, block_ids=(list(range(10)),), num_computed_tokens=num_external
    )
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=[data],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: num_scheduled},
    )


def test_what_vllm_takes_is_loaded(half: SchedulingHalf) -> None:
    request = asked("a")
    assert half.ask(request, 0) == HIT
    half.allocated(request, HIT)
    (load,) = half.plan(new("a", HIT, num_scheduled=len(PROMPT) - HIT)).meta.loads
    assert load.pages[0].ids().tolist() == list(range(HIT // BLOCK))
    assert half.finish("a") == (False, HIT)


def test_what_vllm_does_not_take_is_not_loaded(half: SchedulingHalf) -> None:
    request = asked("a")
    assert half.ask(request, 0) == HIT
    half.allocated(request, 0)
    assert half.plan(new("a", 0, num_scheduled=len(PROMPT))).meta.loads == ()
    assert half.finish("a") == (False, 0)


def test_a_load_that_failed_is_no_hit(half: SchedulingHalf) -> None:
    request = asked("a")
    half.ask(request, 0)
    half.allocated(request, HIT)
    half.plan(new("a", HIT, num_scheduled=len(PROMPT) - HIT))
    half.note_failed({0, 1, 2})
    assert half.finish("a") == (False, 0)


def test_blocks_on_a_device_are_kept_until_the_ranks_have_read_them(half: SchedulingHalf) -> None:
    half._leader.shared.pool.is_host = False
    names = []
    for name, tokens in (("a", list(range(40))), ("b", list(range(3)))):
        request = asked(name)
        request.all_token_ids = tokens
        assert half.ask(request, 0) == 0
        half.allocated(request, 0)
        names.append(half.plan(new(name, 0, num_scheduled=len(tokens))).names)
    assert names == [{0: "a"}, {}]  # nothing of the second fills a block
    assert (half.finish("a"), half.finish("b")) == ((True, 0), (False, 0))


def test_after_a_reset_nothing_is_loaded_or_saved(
    half: SchedulingHalf, caplog: pytest.LogCaptureFixture
) -> None:
    request = asked("a")
    half.ask(request, 0)
    half.allocated(request, HIT)
    half.reset()
    meta = half.plan(new("b", 0, num_scheduled=len(PROMPT))).meta
    assert (meta.loads, meta.saves) == ((), ())
    assert half.ask(asked("c"), 0) == 0
    assert "until it is started again" in caplog.text
