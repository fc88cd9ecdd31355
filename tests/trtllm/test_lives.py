"""Random lives of engines that come and go on one tier; no row is ever wrong."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.actors.shard import Shard
from tests.trtllm.conftest import leased
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.shapes import ALL_WINDOWS, BLOCK, FLAT, MLA, REPLICATED, WINDOWED
from tests.trtllm.version import Version
from tests.unit.actors.small_shard import wait_for

STEPS = 60
ROOTS = [list(range(at, at + 60)) for at in (0, 100, 200)]
ACTIONS = ["submit", "submit", "step", "step", "step", "cancel", "take_away", "defer", "replace"]

prompts = st.tuples(
    st.sampled_from(ROOTS), st.integers(1, 48), st.lists(st.integers(0, 3), max_size=6)
).map(lambda drawn: [*drawn[0][: drawn[1]], *drawn[2]])


class Life:
    """One engine after the other, at most one at a time, with whatever happens to it."""

    def __init__(self, version: Version, data: st.DataObject, patch: pytest.MonkeyPatch) -> None:
        self.version = version
        self.patch = patch
        self.data = data
        self.hit_tokens = 0
        branch, groups = version.stand_in.RESOLVES_LATE, version.stand_in.HAS_GROUPS
        shapes = [FLAT, MLA, *[WINDOWED, ALL_WINDOWS] * groups, *[REPLICATED] * branch]
        self.shape = data.draw(st.sampled_from(shapes), "shape")
        self.num_ranks = data.draw(st.sampled_from([1, 1, 2]), "ranks")
        patch.setenv("KVRAY_CONNECTOR__MODEL_KEY", f"{self.shape.name} of {self.num_ranks}")
        self.engine = self._start()

    def live(self) -> None:
        for _ in range(STEPS):
            getattr(self, self.data.draw(st.sampled_from(ACTIONS), "action"))()
        self.replace()
        self.engine.close()

    def submit(self) -> None:
        prompt = self.data.draw(prompts, "prompt")
        name = self.version.stand_in.SALT_FIELD
        salts = [None, None, 7] if name == "cache_salt_id" else [None, None, "tenant"]
        salt = self.data.draw(st.sampled_from(salts), "salt")
        max_new = self.data.draw(st.integers(1, 9), "max_new")
        self.engine.submit(prompt, max_new=max_new, **{name: salt})

    def step(self) -> None:
        self.engine.step()
        self.hit_tokens += sum(one.num_hit for one in self.engine.active)
        assert self.engine.corrupt_rows == 0

    def cancel(self) -> None:
        if victim := self._any(self._may_go()):
            self.engine.kill(victim)

    def take_away(self) -> None:
        living = [one for one in self._may_go() if one.has_pages and not one.is_ended]
        if self.version.stand_in.HAS_GROUPS and (victim := self._any(living)):
            self.engine.preempt(victim)

    def defer(self) -> None:
        """Choose anew who is left out of batches, and how much of an offer is taken."""
        remainder = self.data.draw(st.integers(0, 3), "left out")
        share = self.data.draw(st.sampled_from([0, 1, 2, 99]), "blocks taken")
        self.engine.defers = lambda request: request.request_id % 4 == remainder
        self.engine.honour = lambda _request, offer: min(offer, share * BLOCK)

    def replace(self) -> None:
        """End the engine when it has done all it was given, and start another."""
        self.engine.defers = lambda _request: False
        self.engine.run()
        assert self.engine.corrupt_rows == self.engine.totals["errors"] == 0
        self.engine.close()
        self.engine = self._start()

    def _start(self) -> Engine:
        draw = self.data.draw
        self.patch.setenv("KVRAY_CONNECTOR__LOAD", draw(st.sampled_from(["sync", "async"]), "load"))
        engine = Engine(
            self.version,
            shape=self.shape,
            num_ranks=self.num_ranks,
            num_pages=draw(st.sampled_from([48, 128]), "pages"),
            chunk=draw(st.sampled_from([None, BLOCK, 3 * BLOCK]), "chunk"),
            is_overlapped=draw(st.booleans(), "overlapped"),
            has_hooks=draw(st.booleans(), "hooks"),
        )
        wait_for(lambda: engine.arena is not None, "joining the tier")
        return engine

    def _may_go(self) -> list[LlmRequest]:
        """Return who may be stopped; engines with groups wait for a transfer's end first."""
        waits = self.version.stand_in.HAS_GROUPS
        alive = [*self.engine.active, *self.engine.waiting]
        return [one for one in alive if not (waits and one.is_parked)]

    def _any(self, requests: list[LlmRequest]) -> LlmRequest | None:
        return self.data.draw(st.sampled_from(requests), "who") if requests else None


@given(data=st.data())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_life_has_a_wrong_row_an_error_or_a_lease_left(
    version: Version, running_shard: Shard, data: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        running_shard.clear(10)
        life = Life(version, data, patch)
        try:
            life.live()
        finally:
            life.engine.close()
        wait_for(lambda: leased(running_shard) == 0, "the end of every lease")
