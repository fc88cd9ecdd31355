"""Weights that are replaced while an engine runs: the tier never answers with the old ones."""

import pytest

from kvray.errors import ConfigError
from kvray.reference.engine import ReferenceEngine
from tests.engine.conftest import BLOCK, MakeEngine, make_prompt
from tests.kit.tier import Tier

PROMPTS = [make_prompt(100, seed=5), make_prompt(70, seed=6)]
NUM_BLOCKS = sum((len(prompt) - 1) // BLOCK for prompt in PROMPTS)
WAIT_S = 60.0
Truth = dict[str, list[tuple[int, ...]]]
NAME = "trained"


@pytest.fixture(scope="module")
def truth() -> Truth:
    """What engines without reuse and without connector say, by their weights."""
    said = {}
    for model in ("tiny:0", "tiny:1"):
        with ReferenceEngine(model, tokens_per_block=BLOCK, enable_block_reuse=False) as engine:
            said[model] = [one.token_ids for one in engine.generate(PROMPTS, max_tokens=8)]
    assert said["tiny:0"] != said["tiny:1"]
    return said


def name(tier: Tier, version: str | None) -> None:
    assert tier.shard.requests.set_weights_version(NAME, version, WAIT_S)


def answers(engine: ReferenceEngine) -> tuple[list[tuple[int, ...]], list[int]]:
    outputs = engine.generate(PROMPTS, max_tokens=8)
    return [one.token_ids for one in outputs], [one.hit_tokens for one in outputs]


@pytest.fixture
def trained(make_joined: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Return a maker of engines of one replica, whose name a client knows."""
    monkeypatch.setenv("KVRAY_CONNECTOR__REPLICA", NAME)
    return make_joined


@pytest.mark.parametrize("options", [{"overlap": True}, {"tensor_parallel_size": 2}], ids=str)
def test_old_weights_never_answer(tier, trained, truth, options):
    engine = trained(**options)
    assert answers(engine) == (truth["tiny:0"], [0] * len(PROMPTS))
    tier.wait_for_stored(NUM_BLOCKS)

    name(tier, None)
    engine.update_weights("tiny:1")
    assert answers(engine) == (truth["tiny:1"], [0] * len(PROMPTS))

    engine.update_weights("tiny:1")  # its own cache is empty again
    before = tier.stored()
    name(tier, "step-1")
    assert answers(engine) == (truth["tiny:1"], [0] * len(PROMPTS))
    tier.wait_for_stored(before + NUM_BLOCKS)

    engine.reset_prefix_cache()
    said, hits = answers(engine)
    assert said == truth["tiny:1"]
    assert min(hits) > 0

    name(tier, None)
    engine.update_weights("tiny:0")
    name(tier, "")
    said, hits = answers(engine)
    assert said == truth["tiny:0"]
    assert min(hits) > 0


def test_weights_that_cannot_be_loaded_leave_the_engine_as_it_is(trained, truth):
    engine = trained()
    with pytest.raises(ConfigError, match="no model"):
        engine.update_weights("/no/such/model")
    assert answers(engine)[0] == truth["tiny:0"]


def test_a_request_that_waits_for_new_weights_may_be_cancelled(trained):
    engine = trained()
    long = engine.submit(PROMPTS[0], max_tokens=64)
    update = engine._intake.update_weights("tiny:1")
    waiting = engine.submit(PROMPTS[1], max_tokens=64)
    engine.cancel(waiting)
    update.result(WAIT_S)
    assert waiting.result(WAIT_S).finish_reason == "cancelled"
    assert long.result(WAIT_S).finish_reason == "length"


def test_requests_that_come_during_a_change_are_answered_with_the_new_weights(tier, trained, truth):
    engine = trained()
    name(tier, None)
    old = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS]
    engine.update_weights("tiny:1")
    name(tier, "step-1")
    new = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS]
    assert [one.result(WAIT_S).token_ids for one in old] == truth["tiny:0"]
    assert [one.result(WAIT_S).token_ids for one in new] == truth["tiny:1"]
