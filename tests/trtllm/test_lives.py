"""Random lives of engines on one tier, and ids that come again; no row is ever wrong."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.trtllm.conftest import PROMPT, leased
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import ALL_WINDOWS, BLOCK, FLAT, HEADS, MLA, REPLICATED, WINDOWED, Shape
from tests.trtllm.version import WITH_GROUPS, Version, on
from tests.waiting import wait_for

ROOTS = [list(range(at, at + 60)) for at in (0, 100, 200)]

PROMPTS = st.tuples(
    st.sampled_from(ROOTS), st.integers(1, 48), st.lists(st.integers(0, 3), max_size=6)
).map(lambda drawn: [*drawn[0][: drawn[1]], *drawn[2]])
ENGINES = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([48, 128]),
        "chunk": st.sampled_from([None, BLOCK, 3 * BLOCK]),
        "is_overlapped": st.booleans(),
        "has_hooks": st.booleans(),
        "cache": st.sampled_from([{}, {"enable_partial_reuse": True}]),
        "size": st.sampled_from([1, 2, 4]),
    }
)
WHO = st.integers(0, 7)
"""Place among those to whom something may happen, if there are so many."""
STEP = st.just(("step",))
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), PROMPTS, st.sampled_from([0, 0, 1]), st.integers(1, 9), WHO),
    *[STEP] * 4,
    st.tuples(st.just("cancel"), WHO),
    st.tuples(st.just("take_away"), WHO),
    st.just(("put_off",)),
    st.tuples(st.just("choose"), st.integers(0, 3), st.sampled_from([0, 1, 2, 99])),
    st.tuples(st.just("replace"), ENGINES),
)
LIVES = st.lists(ACTIONS, min_size=20, max_size=80)


class Life:
    """One engine after the other, at most one at a time, with whatever happens to it."""

    def __init__(
        self, version: Version, patch: pytest.MonkeyPatch, shape: Shape, num_ranks: int
    ) -> None:
        self.version = version
        self.shape = shape
        self.num_ranks = num_ranks
        self.engine: Engine | None = None
        self.requests: list[LlmRequest] = []
        of = "" if shape.num_heads else f" of {num_ranks}"
        patch.setenv("KVRAY_CONNECTOR__MODEL_KEY", f"{shape.name}{of}")

    def submit(self, prompt: list[int], salt: int, max_new: int, again: int) -> None:
        """Submit a request, under the id of one that has ended if there are so many."""
        name = self.version.salt_field
        salts = [None, 7 if name == "cache_salt_id" else "tenant"]
        ended = [one.request_id for one in self.requests if not self.engine.is_busy(one)]
        request_id = ended[again] if again < len(ended) else None
        fields = {name: salts[salt], "request_id": request_id}
        self.requests = [one for one in self.requests if one.request_id != request_id]
        self.requests.append(self.engine.submit(prompt, max_new=max_new, **fields))

    def step(self) -> None:
        self.engine.step()
        assert self.engine.model.corrupt_rows == 0

    def cancel(self, who: int) -> None:
        if who < len(victims := self.engine.executor.active):
            self.engine.kill(victims[who])

    def take_away(self, who: int) -> None:
        victims = [one for one in self.engine.executor.active if one.has_pages]
        if self.version.has_groups and who < len(victims):
            self.engine.preempt(victims[who])

    def put_off(self) -> None:
        """Have the coming batch loaded for, and brought back later."""
        self.engine.drops_batch = True

    def choose(self, remainder: int, blocks: int) -> None:
        """Choose again who is left out of batches, and how much of an offer is taken."""
        self.engine.cache.defers = lambda request: request.request_id % 4 == remainder
        self.engine.cache.accept = lambda _request, offer: min(offer, blocks * BLOCK)

    def replace(self, options: dict[str, Any]) -> None:
        """End the engine when it has done all it was given, and start another.

        Where ranks share out heads, it may have another number of ranks.
        """
        self.finish()
        size = options["size"] if self.shape.num_heads else self.num_ranks
        others = {name: value for name, value in options.items() if name != "size"}
        self.requests = []
        self.engine = Engine(self.version, shape=self.shape, num_ranks=size, **others)
        wait_for(lambda: self.engine.arena is not None, "joining the tier")

    def finish(self) -> None:
        if self.engine is None:
            return
        self.engine.cache.defers = lambda _request: False
        self.engine.run()
        assert self.engine.model.corrupt_rows == self.engine.totals["errors"] == 0
        self.engine.close()


def shapes_of(version: Version) -> list[Shape]:
    shapes = [FLAT, MLA, HEADS]
    if version.has_groups:
        shapes += [WINDOWED, ALL_WINDOWS]
    return [*shapes, REPLICATED] if version.resolves_late else shapes


@given(data=st.data())
@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_life_has_a_wrong_row_an_error_or_a_lease_left(version, running_shard, data):
    shape = data.draw(st.sampled_from(shapes_of(version)), "shape")
    num_ranks = data.draw(st.sampled_from([1, 1, 2]), "ranks")
    first, actions = data.draw(ENGINES, "first engine"), data.draw(LIVES, "life")
    with pytest.MonkeyPatch.context() as patch:
        running_shard.clear(10)
        life = Life(version, patch, shape, num_ranks)
        try:
            for name, *details in [("replace", first), *actions]:
                getattr(life, name)(*details)
            life.finish()
        finally:
            life.engine.close()
        wait_for(lambda: leased(running_shard) == 0, "the end of every lease")


FIRST_LIVES = pytest.mark.parametrize("num_tokens", [1, 40, 41, 70], ids="of_{}_tokens".format)


@FIRST_LIVES
@pytest.mark.parametrize("chunk", [None, 2 * BLOCK], ids=["whole", "chunked"])
@pytest.mark.parametrize("shape", [FLAT, WINDOWED, ALL_WINDOWS], ids=lambda shape: shape.name)
def test_a_second_life_of_an_id_gets_what_it_was_promised(
    make_warm, version, shape, num_tokens, chunk
):
    if shape is not FLAT and not version.has_groups:
        pytest.skip("this version has one pool, without windows")
    warm = make_warm(shape=shape, chunk=chunk)
    first = warm.serve(list(range(num_tokens)), max_new=5)
    second = warm.submit([*PROMPT, *range(20)], max_new=9, request_id=first.request_id)
    other = warm.submit([*PROMPT[:20], 7], max_new=9)
    warm.run()
    assert (second.num_hit, other.num_hit) == (40, 20)


@FIRST_LIVES
def test_what_a_second_life_computes_of_its_prompt_is_saved_under_its_own_keys(
    make_engine, num_tokens
):
    cold = make_engine(is_flat=True)
    first = cold.serve(list(range(num_tokens)), max_new=9)
    cold.submit(PROMPT, max_new=9, request_id=first.request_id)
    cold.finish()
    warm = make_engine(is_flat=True)
    assert warm.serve(PROMPT, max_new=2).num_hit == 36
    answers = [*PROMPT, *first.get_tokens(0)[40:]]
    warm.serve(answers, max_new=2)
    warm.serve(first.get_tokens(0), max_new=2)


def test_an_id_may_come_again_after_a_cancelled_request(make_warm):
    warm = make_warm()
    victim = warm.submit(list(range(50)), max_new=20)
    for _ in range(3):
        warm.step()
    warm.kill(victim)
    second = warm.submit(PROMPT, max_new=5, request_id=victim.request_id)
    warm.run()
    assert second.num_hit == 36


@on(*WITH_GROUPS)
@pytest.mark.parametrize("num_tokens", [0, 10], ids=["a_new_id", "a_known_id"])
def test_nothing_is_saved_of_a_second_life_that_nobody_asked_about(make_engine, num_tokens):
    """The first was cancelled between the question and its report."""
    cold = make_engine()
    before = cold.serve([5] * num_tokens) if num_tokens else None
    first = cold.submit(PROMPT, request_id=before and before.request_id)
    cold.at["asked"] = lambda engine: engine.kill(first)
    cold.step()
    cold.at.clear()
    others = list(range(500, 540))
    fields = {"is_generation_only_request": True, "cache_salt": "other"}
    cold.submit(others, max_new=9, request_id=first.request_id, **fields)
    cold.finish()
    warm = make_engine()
    assert [warm.serve(prompt).num_hit for prompt in (PROMPT, others)] == [0, 0]
