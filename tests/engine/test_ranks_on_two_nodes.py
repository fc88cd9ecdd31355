"""Ranks that are processes on two nodes, each with its own tier, share prompts through both."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.lab.reference.engine import ReferenceEngine
from kvray.store import Arena
from tests.engine.conftest import BLOCK, make_prompt
from tests.engine.test_kvray_connector import CONNECTOR
from tests.engine.test_tensor_parallel import start
from tests.unit.connector.test_scheduler import flip_a_byte
from tests.unit.connector.two_nodes import TwoNodes
from tests.waiting import wait_for

Expected = Callable[..., tuple[int, ...]]
PROMPTS = [make_prompt(96, seed=1), make_prompt(100, seed=2), make_prompt(17, seed=3)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    """Two nodes; the engine's leader is on the first."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    for name, value in {
        "KVRAY_ARENA__DIR": "",
        "KVRAY_ARENA__CAPACITY": "32MiB",
        "KVRAY_ARENA__LOCK_WAIT_S": "0.5",
        "KVRAY_CONNECTOR__MODEL_KEY": "tiny",
        "KVRAY_CONNECTOR__ATTACH_RETRY_S": "0.05",
        "KVRAY_CONNECTOR__STAGE_WAIT_S": "5",
    }.items():
        monkeypatch.setenv(name, value)
    made = TwoNodes(parent)
    monkeypatch.setenv("KVRAY_ARENA__DIR", str(made.directories[0]))
    yield made
    made.close()
    shutil.rmtree(parent)


def spread(
    nodes: TwoNodes, name: str, monkeypatch: pytest.MonkeyPatch, **options: object
) -> ReferenceEngine:
    """Return an engine with a rank on each node, once their shards know of both."""
    monkeypatch.setenv("KVRAY_CONNECTOR__REPLICA", name)
    env = {"KVRAY_ARENA__DIR": str(nodes.directories[1])}
    engine = start(
        2, ranks_per_node=1, rank_env=[env], num_blocks=64, connector=CONNECTOR, **options
    )
    lookup = nodes.line.lookup
    wait_for(lambda: len(lookup.replica(name, time.monotonic())) == 2)
    wait_for(lambda: engine.connector.scheduler._shared.may_stage)  # type: ignore[union-attr]
    return engine


def test_fresh_ranks_load_on_each_node_what_cold_ranks_stored_there(
    nodes: TwoNodes, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools full of NaN: a byte of the wrong rank, or of none, would show in the answer."""
    with spread(nodes, "cold", monkeypatch) as cold:
        for prompt in PROMPTS:
            assert cold.generate(prompt, max_tokens=8).token_ids == expected(prompt, 8)
    for name, options in (("fresh", {}), ("overlapped", {"overlap": True, "runtime": "main"})):
        with spread(nodes, name, monkeypatch, **options) as fresh:
            outputs = fresh.generate(PROMPTS, max_tokens=8)
        assert [one.hit_tokens for one in outputs] == [
            (len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS
        ]
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.token_ids == expected(prompt, 8)
    wait_for(lambda: nodes.leased() == [0, 0])


@pytest.mark.long
def test_a_flipped_byte_on_another_node_is_a_shorter_hit_and_no_dead_engine(
    nodes: TwoNodes, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPTS[1]
    with spread(nodes, "cold", monkeypatch) as cold:
        cold.generate(prompt, max_tokens=8)
    flip_a_byte(Arena(nodes.directories[1] / "kvray-kvray", lock_wait_s=1), depth=3)
    with spread(nodes, "fresh", monkeypatch) as fresh:
        output = fresh.generate(prompt, max_tokens=8)
        assert output.token_ids == expected(prompt, 8)
        assert output.hit_tokens == 3 * BLOCK
        assert fresh.generate(PROMPTS[0], max_tokens=8).token_ids == expected(PROMPTS[0], 8)
    wait_for(lambda: nodes.leased() == [0, 0])


def test_variables_are_given_for_every_further_rank_or_for_none() -> None:
    with pytest.raises(ConfigError, match="rank_env has variables for 2 ranks"):
        start(2, rank_env=[{}, {}])
    with pytest.raises(ConfigError, match="ranks_per_node is 0"):
        start(2, ranks_per_node=0)
