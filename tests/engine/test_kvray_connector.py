"""Reference engines over the real connector and a real shard say what they would say alone.

So do ranks that are processes on two nodes, each with its own tier.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.lookup.lookup import Lookup
from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError
from kvray.reference import KvConnectorConfig, Replica
from kvray.reference.engine import ReferenceEngine
from kvray.store import Arena
from tests.engine.conftest import BLOCK, MakeEngine, make_prompt
from tests.engine.test_tensor_parallel import start
from tests.unit.connector.test_scheduler import flip_a_byte
from tests.unit.connector.two_nodes import TwoNodes
from tests.waiting import wait_for

Expected = Callable[..., tuple[int, ...]]
CONNECTOR = KvConnectorConfig(
    connector_module="kvray.connector",
    connector_scheduler_class="KvRayScheduler",
    connector_worker_class="KvRayWorker",
)
WAIT_S = 20.0


class Tier:
    """A shard without Ray, configured through the environment as an engine is."""

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.start()

    def start(self) -> None:
        settings = ShardSettings.of(load_config())
        self.directory = settings.directory
        self.shard = Shard("test", settings, [lambda a: self.lookup.announce(a, time.monotonic())])
        self.shard.start()
        self.wait_for(lambda: self.shard.status()["state"] == "serving")

    def stop(self) -> None:
        self.shard.stop(retire=True, timeout_s=WAIT_S)

    def stored(self) -> int:
        return int(self.shard.status()["arena"]["stored"])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.shard.status()
            time.sleep(0.01)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Variables that lead to a tier of this test's own."""
    parent = tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-")
    variables = {
        "KVRAY_ARENA__DIR": parent,
        "KVRAY_ARENA__CAPACITY": "32MiB",
        "KVRAY_ARENA__LOCK_WAIT_S": "0.5",
        "KVRAY_CONNECTOR__MODEL_KEY": "tiny",
        "KVRAY_CONNECTOR__ATTACH_RETRY_S": "0.05",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield variables
    sweep(load_config().node_dir)
    shutil.rmtree(parent)


@pytest.fixture
def tier(environment: dict[str, str]) -> Iterator[Tier]:
    made = Tier()
    yield made
    made.stop()


PROMPTS = [make_prompt(n, seed=5) for n in (100, 96, 50, 16, 15, 1)] + [make_prompt(70, seed=6)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK},
    {"enable_chunked_prefill": True, "chunk_tokens": BLOCK, "overlap": True},
    {"enable_block_reuse": False},
    {"enable_partial_reuse": True},
    {"num_blocks": 12},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ",".join(options) or "plain")
def test_answers_are_those_of_an_engine_alone(
    tier: Tier,
    make_engine: MakeEngine,
    expected: Expected,
    options: dict[str, Any],
) -> None:
    for _ in range(2):
        engine = make_engine(connector=CONNECTOR, **options)
        for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, max_tokens=20), strict=True):
            assert output.token_ids == expected(prompt, 20)
        engine.close()


@pytest.mark.parametrize("num_tokens", [96, 100])
def test_a_fresh_engine_loads_all_full_blocks_but_the_last_token(
    tier: Tier,
    make_engine: MakeEngine,
    expected: Expected,
    num_tokens: int,
) -> None:
    prompt = make_prompt(num_tokens, seed=7)
    make_engine(connector=CONNECTOR).generate(prompt, max_tokens=1)
    tier.wait_for(lambda: tier.stored() >= num_tokens // BLOCK)
    output = make_engine(connector=CONNECTOR).generate(prompt, max_tokens=20)
    assert output.hit_tokens == (num_tokens - 1) // BLOCK * BLOCK
    assert output.token_ids == expected(prompt, 20)


def test_what_was_generated_is_a_hit_for_the_next_turn(
    tier: Tier, make_engine: MakeEngine, expected: Expected
) -> None:
    prompt = make_prompt(40, seed=8)
    answer = make_engine(connector=CONNECTOR).generate(prompt, max_tokens=60)
    follow_up = [*prompt, *answer.token_ids, *make_prompt(9, seed=9)]
    tier.wait_for(lambda: tier.stored() >= (len(follow_up) - 10) // BLOCK)
    output = make_engine(connector=CONNECTOR).generate(follow_up, max_tokens=20)
    assert output.hit_tokens >= 96 // BLOCK * BLOCK
    assert output.token_ids == expected(follow_up, 20)


def test_other_salts_do_not_share(tier: Tier, make_engine: MakeEngine) -> None:
    prompt = make_prompt(100, seed=10)
    make_engine(connector=CONNECTOR).generate(prompt, max_tokens=1, salt="one")
    tier.wait_for(lambda: tier.stored() >= 6)
    engine = make_engine(connector=CONNECTOR)
    assert engine.generate(prompt, max_tokens=1, salt="two").hit_tokens == 0
    assert engine.generate(prompt, max_tokens=1, salt="one").hit_tokens == 96


def test_a_small_arena_that_evicts_all_the_time_never_changes_an_answer(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    make_engine: MakeEngine,
    expected: Expected,
) -> None:
    monkeypatch.setenv("KVRAY_ARENA__CAPACITY", "1MiB")
    tier = Tier()
    for turn in range(3):
        engine = make_engine(connector=CONNECTOR, num_blocks=20, overlap=bool(turn % 2))
        prompts = [make_prompt(120, seed=20 + number) for number in range(6)]
        for prompt, output in zip(prompts, engine.generate(prompts, max_tokens=8), strict=True):
            assert output.token_ids == expected(prompt, 8)
        engine.close()
    assert tier.shard.status()["arena"]["evicted"] > 0
    tier.stop()


@pytest.mark.parametrize("overlap", [False, True])
def test_cancelled_requests_leave_no_wrong_block(
    tier: Tier, make_engine: MakeEngine, expected: Expected, overlap: bool
) -> None:
    """Their blocks are made NaN at once, and given to the next request."""
    engine = make_engine(connector=CONNECTOR, num_blocks=24, overlap=overlap)
    prompts = [make_prompt(100, seed=40 + number) for number in range(12)]
    for prompt in prompts:
        doomed = engine.submit(prompt, max_tokens=60)
        engine.submit(prompt[:33], max_tokens=2).result()
        engine.cancel(doomed)
    engine.close()
    fresh = make_engine(connector=CONNECTOR)
    outputs = [fresh.generate(prompt, max_tokens=8) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == expected(prompt, 8)
    assert sum(output.hit_tokens for output in outputs) > 0


def test_a_flipped_byte_is_a_shorter_hit_and_not_a_wrong_answer(
    tier: Tier, make_engine: MakeEngine, expected: Expected
) -> None:
    prompt = make_prompt(100, seed=11)
    make_engine(connector=CONNECTOR).generate(prompt, max_tokens=1)
    tier.wait_for(lambda: tier.stored() >= 6)
    engine = make_engine(connector=CONNECTOR)
    arena = engine.connector.worker._rank.shared.link.arena  # type: ignore[union-attr]
    victim = int((arena.tables.slot_depth * (arena.tables.slot_state == 2)).argmax())
    slab, row = arena.tables.geometry.place_of(victim)
    arena.tables.rows(slab)[row, 5] ^= 1
    output = engine.generate(prompt, max_tokens=20)
    assert output.hit_tokens == 5 * BLOCK
    assert output.token_ids == expected(prompt, 20)
    assert tier.shard.status()["arena"]["corrupt"] == 1


def test_an_engine_that_started_before_its_tier_joins_it(
    environment: dict[str, str], make_engine: MakeEngine, expected: Expected
) -> None:
    prompt = make_prompt(100, seed=12)
    engine = make_engine(connector=CONNECTOR, enable_block_reuse=True)
    assert engine.generate(prompt, max_tokens=4).token_ids == expected(prompt, 4)
    tier = Tier()
    tier.wait_for(lambda: tier.shard.status()["arena"]["holders"] == 1)
    other = make_prompt(100, seed=13)
    engine.generate(other, max_tokens=1)
    tier.wait_for(lambda: tier.stored() >= 6)
    tier.stop()


def test_an_engine_outlives_its_tier_and_joins_the_next(
    tier: Tier, make_engine: MakeEngine, expected: Expected
) -> None:
    engine = make_engine(connector=CONNECTOR, num_blocks=12)
    prompts = [make_prompt(100, seed=30 + number) for number in range(3)]
    for prompt in prompts:
        engine.generate(prompt, max_tokens=1)
    tier.stop()
    for prompt in prompts:
        output = engine.generate(prompt, max_tokens=8)
        assert output.token_ids == expected(prompt, 8)
        assert output.hit_tokens == 0
    tier.start()
    tier.wait_for(lambda: tier.shard.status()["arena"]["holders"] == 1)
    engine.generate(prompts[0], max_tokens=1)
    tier.wait_for(lambda: tier.stored() > 0)


def test_two_replicas_in_processes_of_their_own_share_a_prompt(
    tier: Tier, expected: Expected, environment: dict[str, str]
) -> None:
    prompt = make_prompt(100, seed=14)
    options: dict[str, Any] = {
        "model": "tiny",
        "tokens_per_block": BLOCK,
        "num_blocks": 64,
        "connector": CONNECTOR,
        "env": environment,
    }
    first, second = Replica.spawn("first", **options), Replica.spawn("second", **options)
    try:
        first.wait_ready(120)
        second.wait_ready(120)
        first.generate(prompt, max_tokens=1)
        tier.wait_for(lambda: tier.stored() >= 6)
        output = second.generate(prompt, max_tokens=16)
    finally:
        first.close()
        second.close()
    assert output.hit_tokens == 96
    assert output.token_ids == expected(prompt)


def test_a_replica_of_another_layout_under_the_same_model_key_is_refused(
    tier: Tier, make_engine: MakeEngine, environment: dict[str, str]
) -> None:
    make_engine(connector=CONNECTOR).generate(make_prompt(20), max_tokens=1)
    tier.wait_for(lambda: any(r["connected"] for r in tier.shard.status()["replicas"]))
    with pytest.raises(KVRayError, match=r"both claim model_key 'tiny'.*tokens_per_block"):
        Replica.start(
            "other",
            model="tiny",
            tokens_per_block=2 * BLOCK,
            num_blocks=32,
            connector=CONNECTOR,
            env=environment,
        )


TWO_NODES_PROMPTS = [
    make_prompt(96, seed=1),
    make_prompt(100, seed=2),
    make_prompt(17, seed=3),
]


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
        for prompt in TWO_NODES_PROMPTS:
            assert cold.generate(prompt, max_tokens=8).token_ids == expected(prompt, 8)
    for name, options in (("fresh", {}), ("overlapped", {"overlap": True, "runtime": "main"})):
        with spread(nodes, name, monkeypatch, **options) as fresh:
            outputs = fresh.generate(TWO_NODES_PROMPTS, max_tokens=8)
        assert [one.hit_tokens for one in outputs] == [
            (len(prompt) - 1) // BLOCK * BLOCK for prompt in TWO_NODES_PROMPTS
        ]
        for prompt, output in zip(TWO_NODES_PROMPTS, outputs, strict=True):
            assert output.token_ids == expected(prompt, 8)
    wait_for(lambda: nodes.leased() == [0, 0])


@pytest.mark.long
def test_a_flipped_byte_on_another_node_is_a_shorter_hit_and_no_dead_engine(
    nodes: TwoNodes, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = TWO_NODES_PROMPTS[1]
    with spread(nodes, "cold", monkeypatch) as cold:
        cold.generate(prompt, max_tokens=8)
    flip_a_byte(Arena(nodes.directories[1] / "kvray-kvray", lock_wait_s=1), depth=3)
    with spread(nodes, "fresh", monkeypatch) as fresh:
        output = fresh.generate(prompt, max_tokens=8)
        assert output.token_ids == expected(prompt, 8)
        assert output.hit_tokens == 3 * BLOCK
        assert fresh.generate(TWO_NODES_PROMPTS[0], max_tokens=8).token_ids == expected(
            TWO_NODES_PROMPTS[0], 8
        )
    wait_for(lambda: nodes.leased() == [0, 0])


def test_variables_are_given_for_every_further_rank_or_for_none() -> None:
    with pytest.raises(ConfigError, match="rank_env has variables for 2 ranks"):
        start(2, rank_env=[{}, {}])
    with pytest.raises(ConfigError, match="ranks_per_node is 0"):
        start(2, ranks_per_node=0)
