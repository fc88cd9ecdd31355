"""Engines on different nodes, of one model and with different numbers of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kit.two_nodes import TwoNodes
from tests.trtllm.conftest import PROMPT
from tests.trtllm.engine import Engine
from tests.trtllm.memory import HEADS
from tests.trtllm.version import Version, on
from tests.unit.connector.conftest import nodes, running_nodes
from tests.waiting import wait_for

__all__ = ["nodes", "running_nodes"]


@pytest.fixture
def engine_on(
    version: Version,
    nodes: TwoNodes,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., Engine]]:
    """Make engines on the node of a number; whatever they did, no row was wrong."""
    engines: list[Engine] = []
    # What earlier tests have stored is known of for longer than it is there.
    monkeypatch.setenv("KVRAY_CONNECTOR__MODEL_KEY", request.node.name)

    def make(node: int, **options: Any) -> Engine:
        monkeypatch.setenv("KVRAY_ARENA__DIR", str(nodes.directories[node]))
        engines.append(Engine(version, shape=HEADS, **options))
        wait_for(lambda: engines[-1].arena is not None, "joining the tier")
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert (engine.model.corrupt_rows, engine.totals["errors"]) == (0, 0)
    wait_for(lambda: nodes.leased() == [0, 0], "the end of every lease")


@on("v1_2", "main_line")
@pytest.mark.parametrize(("stored_by", "read_by", "num_calls"), [(2, 4, 2), (2, 2, 1)])
def test_another_node_is_asked_for_sizes_that_somebody_has_and_no_others(
    engine_on, stored_by, read_by, num_calls
):
    cold, warm = engine_on(0, num_ranks=stored_by), engine_on(1, num_ranks=read_by)
    cold.serve(PROMPT)
    state, theirs = (one.workers[0]._rank.shared for one in (warm, cold))
    others = [one for one in state.identity.readings[1:] if one.digest == theirs.identity.digest]
    assert len(others) == num_calls - 1
    told = state.stored_by_others
    wait_for(lambda: state.may_stage and all(one in told() for one in others), "the shard's word")
    assert warm.serve(list(range(40))).num_hit == 0
    assert warm.totals["stage_calls"] == num_calls
