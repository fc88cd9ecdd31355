"""Engines on different nodes, of one model and with different numbers of ranks."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kit.two_nodes import TwoNodes
from tests.trtllm.engine import Engine
from tests.trtllm.shapes import HEADS
from tests.trtllm.version import Version, on
from tests.unit.connector.conftest import nodes, running_nodes
from tests.waiting import wait_for

__all__ = ["nodes", "running_nodes"]

PROMPT = list(range(100, 140))

pytestmark = on("v1_2", "main_line")

MakeEngine = Callable[..., Engine]

_NUMBERS = itertools.count()


@pytest.fixture
def make_engine(
    version: Version, nodes: TwoNodes, patient_saves: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Make engines on the node of a number; whatever they did, no row was wrong."""
    engines: list[Engine] = []
    # What earlier tests have stored is known of for longer than it is there.
    monkeypatch.setenv("KVRAY_CONNECTOR__MODEL_KEY", f"{next(_NUMBERS)}")

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


def hears_of(engine: Engine, other: Engine) -> None:
    """Return when an engine's shard has said that the other's blocks are somewhere."""
    pool, theirs = engine.workers[0]._rank.shared.pool, other.workers[0]._rank.shared.pool
    (reading,) = [one for one in pool.others if one.digest == theirs.own.digest]
    wait_for(lambda: reading in pool.stored_by_others() and pool.has_peers, "the shard's word")


def test_the_shard_is_asked_for_sizes_that_somebody_has(make_engine: MakeEngine) -> None:
    cold, warm = make_engine(0, num_ranks=2), make_engine(1, num_ranks=4)
    cold.serve(PROMPT)
    hears_of(warm, cold)
    assert warm.serve(list(range(40))).num_hit == 0
    assert warm.totals["stage_calls"] == 2


def test_nobody_is_asked_for_sizes_that_nobody_has(make_engine: MakeEngine) -> None:
    cold, warm = make_engine(0, num_ranks=2), make_engine(1, num_ranks=2)
    cold.serve(PROMPT)
    pool = warm.workers[0]._rank.shared.pool
    wait_for(lambda: pool.has_peers, "the shard's word")
    assert warm.serve(list(range(40))).num_hit == 0
    assert warm.totals["stage_calls"] == 1
