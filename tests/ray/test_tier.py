"""A tier on a local Ray: up and down, what it answers, refuses and explains."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from typer.testing import CliRunner

from kvray.actors.owner.claim import owner_of
from kvray.actors.ray_glue.calls import call, list_actors, tier_named
from kvray.actors.shard.actor import memory_claims
from kvray.actors.supervisor.supervisor import chosen_nodes
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.cli.app import app
from kvray.client import Client
from kvray.config import KVRayConfig, ShardConfig
from kvray.errors import ConfigError, ShardUnavailable
from kvray.reference.engine import ReferenceEngine
from kvray.store.machine.capacity import MemoryClaims
from tests.kit.ray.cluster import CONNECTOR
from tests.ray.conftest import TIMEOUT_S, config_with, shard_status
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = pytest.mark.ray


def test_up_status_and_down(config):
    (shard,) = tier.up(config, timeout_s=TIMEOUT_S)
    assert shard["state"] == "serving"
    assert shard["memory"]["mapped_bytes"] > 0
    assert config.node_dir.is_dir()
    owner = owner_of(config.node_dir)
    assert owner is not None
    assert nicenesses_beside_the_raylet(owner.pid) == {0}
    status = tier.status(timeout_s=TIMEOUT_S)
    assert status["cluster_name"] == config.cluster_name
    assert [one["shard"] for one in status["shards"]] == [shard["shard"]]
    assert tier.down(timeout_s=TIMEOUT_S)
    assert not config.node_dir.exists()
    assert list_actors() == []
    assert not tier.down(timeout_s=TIMEOUT_S)
    with Client(config) as client:
        for ask in (client.status, client.clear, lambda: client.match(chain(1))):
            with pytest.raises(ShardUnavailable, match="start the tier with `kvray up`"):
                ask()


def nicenesses_beside_the_raylet(pid: int) -> set[int]:
    """Return by how much the threads of an actor's process come later than its raylet."""
    raylet = os.getpriority(os.PRIO_PROCESS, psutil.Process(pid).ppid())
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return {os.getpriority(os.PRIO_PROCESS, one) - raylet for one in threads}


ALIVE = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 1.0, "kvray_shard": 1.0}}
PLAIN = {"NodeID": "b", "Alive": True, "Resources": {"CPU": 1.0}, "Labels": {"tier": "kv"}}
DEAD = {"NodeID": "c", "Alive": False, "Resources": {"kvray_shard": 1.0}}


@pytest.mark.parametrize(
    ("resource", "label", "chosen"),
    [
        (None, None, {"a", "b"}),
        ("kvray_shard", None, {"a"}),
        (None, "tier=kv", {"b"}),
        (None, "tier=other", set()),
        ("kvray_shard", "tier=kv", set()),
        ("nowhere", None, set()),
    ],
)
def test_living_nodes_with_the_resource_and_the_label_get_a_shard(resource, label, chosen):
    shard = ShardConfig(resource=resource, label=label)
    assert chosen_nodes([ALIVE, PLAIN, DEAD], shard) == chosen


MIB = 2**20


def claims_on_a_node() -> MemoryClaims:
    task = ray.remote(memory_claims).options(num_cpus=0)
    found: MemoryClaims = ray.get(task.remote(), timeout=TIMEOUT_S)
    return found


def test_what_is_in_the_object_store_is_no_claim_any_more(local):
    before = claims_on_a_node()
    assert 30 * MIB < before.object_store_bytes <= 80 * MIB
    assert before.threshold == 0.95
    held = ray.put(np.zeros(20 * MIB, dtype=np.uint8))
    expected = before.object_store_bytes - 20 * MIB
    wait_for(lambda: claims_on_a_node().object_store_bytes <= expected, "Ray's own figure")
    del held


def test_up_twice_changes_nothing_whatever_a_clients_own_settings(steady):
    before = shard_status()
    for again in (steady, config_with(connector__replica="mine", ray__timeout_s=7)):
        (shard,) = tier.up(again, timeout_s=TIMEOUT_S)
        assert shard["pid"] == before["pid"]
        assert shard["arena"]["arena_id"] == before["arena"]["arena_id"]


def test_a_tier_of_another_name_is_not_started_in_this_one_s_namespace(steady):
    other = config_with("other")
    with pytest.raises(ConfigError, match=f"in the namespace 'kvray-{steady.cluster_name}'"):
        tier.up(other, timeout_s=TIMEOUT_S)
    assert not other.node_dir.exists()


def test_a_client_means_its_tier_whatever_namespace_its_process_joined(steady):
    with Client(steady) as client, tier_named("elsewhere"):
        assert client.status()["cluster_name"] == steady.cluster_name
        with pytest.raises(ShardUnavailable, match="'elsewhere'"):
            tier.status(timeout_s=TIMEOUT_S)


def test_an_engine_and_a_client_see_the_same_blocks(running, engine):
    one = engine(running)
    assert one.say("link.register(registration)") == "None"
    one.say("store(link.arena, chain(5)) and None")
    keys = chain(5)
    with Client(running) as client:
        wait_for(lambda: client.match(keys).num_blocks == 5)
        assert list(client.match(keys).holders.values()) == [5]
        assert client.match(keys, num_parts=2).num_blocks == 0
        assert client.match([]).num_blocks == 0
        assert "one" in [one["replica"] for one in shard_status()["replicas"]]
        assert client.clear() == 5
        wait_for(lambda: client.match(keys).num_blocks == 0)
        assert client.clear() == 0
    assert ray.is_initialized(), "the client did not make this connection"
    assert one.say("'ray' in sys.modules") == "False"


def test_what_is_no_key_or_number_of_parts_is_refused_before_the_call(steady):
    wrong: list[Any] = [b"short", 7, "text", bytearray(32)]
    with Client(steady) as client:
        for key in wrong:
            with pytest.raises(ConfigError, match="A key is 32 bytes"):
                client.match([key])
        with pytest.raises(ConfigError, match="num_parts"):
            client.match(chain(1), num_parts=0)


def test_an_actor_that_does_not_answer_costs_the_deadline_and_a_dead_one_says_so(local):
    class Slow:
        def wait(self, seconds: float) -> None:
            time.sleep(seconds)

    slow = ray.remote(Slow).options(num_cpus=0).remote()
    call(slow.wait, 0.0, timeout_s=TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(ShardUnavailable, match="did not answer in time"):
        call(slow.wait, 30.0, timeout_s=0.3)
    assert time.monotonic() - began < 5
    ray.kill(slow)
    with pytest.raises(ShardUnavailable, match="is gone"):
        call(slow.wait, 0.0, timeout_s=TIMEOUT_S)


@pytest.fixture
def label(local: LocalRay) -> str:
    """A label that this Ray's only living node has."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    key, value = next(iter(node["Labels"].items()))
    return f"{key}={value}"


def test_only_a_node_with_the_label_has_what_it_says_and_engines_find_it(config, label, engine):
    nodes = [
        {"label": label, "arena": {"capacity": "32MiB", "free_target": 0.1}},
        {"label": "kvray.io/pool=nobodys", "arena": {"capacity": "64MiB"}},
    ]
    there = config_with(nodes=nodes)
    (shard,) = tier.up(there, timeout_s=TIMEOUT_S)
    assert shard["arena"]["capacity_bytes"] == 32 * MIB
    one = engine(config)  # knows nothing of labels
    assert one.say("link.register(registration)") == "None"
    one.say("store(link.arena, chain(2)) and None")
    assert tier.clear(timeout_s=TIMEOUT_S) == len(chain(2))
    assert tier.down(timeout_s=TIMEOUT_S, config=there)
    assert not config.node_dir.exists()


def test_what_contradicts_itself_on_one_node_only_is_said_by_up(config, label):
    nodes = [
        {"label": label, "arena": {"slab": "16MiB"}},
        {"label": label, "arena": {"capacity": "8MiB"}},
    ]
    # With two labels it would load: which of them one node has, only the node knows.
    unchecked = KVRayConfig.model_validate(
        {**config.model_dump(exclude_unset=True), "nodes": nodes}
    )
    with pytest.raises(ConfigError, match=r"^On this node: .*arena\.slab \(16MiB\) is larger"):
        tier.up(unchecked, timeout_s=TIMEOUT_S)


BLOCK = 16
PROMPT = [number * 7 % 250 + 1 for number in range(320)]
OTHER = [number * 11 % 250 + 1 for number in range(320)]
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK

Ask = Callable[..., int]


@pytest.fixture
def ask(running: KVRayConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Has engines answer prompts, each made at its first one; returns the tokens that hit."""
    monkeypatch.setenv("KVRAY_CLUSTER_NAME", running.cluster_name)
    engines: dict[str, ReferenceEngine] = {}
    with contextlib.ExitStack() as ended:

        def answer(name: str, prompt: list[int], **options: Any) -> int:
            if name not in engines:
                # Two layouts must not have one key.
                monkeypatch.setenv("KVRAY_CONNECTOR__MODEL_KEY", name.partition("-")[0])
                monkeypatch.setenv("KVRAY_CONNECTOR__REPLICA", name)
                options = {"tokens_per_block": BLOCK, "num_blocks": 64, **options}
                engines[name] = ReferenceEngine("tiny", connector=CONNECTOR, **options)
                ended.callback(engines[name].close)
            return engines[name].generate(prompt, max_tokens=2).hit_tokens

        yield answer


def await_saved() -> None:
    """Return when the blocks of a prompt are stored."""
    wait_for(lambda: shard_status()["arena"]["blocks"] >= len(PROMPT) // BLOCK, "saving")


def latest(client: Client, replica: str) -> dict[str, Any]:
    (request,) = client.explain(replica=replica)["requests"]
    return dict(request)


def kvray(*args: str) -> str:
    """Return what a command prints; it uses the connection of this process."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_requests_are_explained_from_the_first_hit_to_what_went_and_who_had_it_go(
    running, ask, tmp_path
):
    client = Client(running)

    # Never stored, and then a hit at another replica.
    assert ask("tiny-one", PROMPT) == 0
    await_saved()
    assert ask("tiny-two", PROMPT) == HIT
    first, hit = latest(client, "tiny-one"), latest(client, "tiny-two")
    assert (first["reason"], first["missed_tokens"]) == ("never_stored", HIT)
    assert (hit["hit_tokens"], hit["missed_tokens"], hit["reason"]) == (HIT, 0, "none")
    assert hit["ranges"][0] == {"start": 0, "stop": HIT, "what": "hit", "way": "host", "source": ""}
    assert hit["namespace"] == first["namespace"]

    # Evicted, with time and by whom.
    assert client.clear() >= len(PROMPT) // BLOCK
    assert ask("tiny-three", PROMPT) == 0
    gone = latest(client, "tiny-three")
    assert gone["reason"] == "evicted"
    (missed,) = [one for one in gone["ranges"] if one["what"] == "miss"]
    assert (missed["start"], missed["stop"], missed["left_by"]) == (0, HIT, "cleared")
    assert first["at"] < missed["left_at"][0] <= missed["left_at"][1] < gone["at"]

    # A prompt, without a request: what is there, and what never was.
    await_saved()
    asked = PROMPT[:160] + OTHER[:100]
    (stored,) = client.explain_tokens(asked, replica="tiny-three")["prompts"]
    assert (stored["stored_tokens"], stored["reason"]) == (160, "never_stored")
    assert [one["what"] for one in stored["ranges"]] == ["stored", "never_stored", "computed"]

    # As people see it.
    of_two = kvray("explain", "--last", "--replica", "tiny-two")
    assert f"{HIT} of {len(PROMPT)} tokens were hits (in the node's memory already)" in of_two
    listed = kvray("explain", "--last", "4")
    assert all(name in listed for name in ("tiny-one", "evicted"))
    (tmp_path / "prompt.txt").write_text(" ".join(map(str, PROMPT)))
    of_prompt = ("--tokens", str(tmp_path / "prompt.txt"), "--replica", "tiny-three", "--json")
    (found,) = json.loads(kvray("explain", *of_prompt))["prompts"]
    assert found["stored_tokens"] == len(PROMPT)
    unknown = CliRunner().invoke(app, ["explain", "987654"])
    assert unknown.exit_code == 2
    assert "No request 987654 is known" in unknown.stderr


def test_what_is_stored_and_used_most_is_listed(running, ask):
    ask("listed-one", PROMPT)
    await_saved()
    ask("listed-two", PROMPT[:170])

    namespaces = json.loads(kvray("ls", "--json"))["namespaces"]
    (namespace,) = [one for one in namespaces if one["fields"].get("model") == "key:listed"]
    assert sorted(namespace["replicas"]) == ["listed-one", "listed-two"]
    assert namespace["host_blocks"] >= len(PROMPT) // BLOCK
    assert namespace["fields"]["served"] in kvray("ls")

    def hottest() -> dict[str, Any]:
        found = json.loads(kvray("ls", namespace["namespace"], "--hottest", "1", "--json"))
        return dict(found["prefixes"][0])

    wait_for(lambda: hottest()["uses"] == 1, "seeing the use")
    assert hottest()["num_blocks"] == 170 // BLOCK
    assert "160" in kvray("ls", namespace["namespace"])
    assert CliRunner().invoke(app, ["ls", "none"]).exit_code == 2


def test_what_memory_would_be_worth_is_said_once_there_is_traffic(running, ask):
    def found() -> dict[str, Any]:
        entries = json.loads(kvray("size", "--now", "--json"))["namespaces"]
        return next((one for one in entries if one["model"] == "key:sized"), {})

    for count in (16, 32):  # the latest half counts, and none of it is the first report
        for turn in range(16):
            for prompt in (PROMPT, OTHER):
                ask(f"sized-{turn % 2}", prompt)

        def has_all(least: int = count * 19) -> bool:
            return bool(found().get("sampled_blocks", 0) >= least)

        wait_for(has_all, "the engines' reports")
    entry = found()
    assert entry["host_bytes"] == running.arena.capacity
    # Each engine's own pool has most of what comes again.
    assert entry["own"] > 0.4
    assert entry["is_sure"]
    assert 0.8 < entry["own"] + entry["host"][-1] < 1
    assert entry["error"][-1] < 0.02, "so few prompts are all in the sample"
    assert "predicted for today's" in kvray("size", "--now")
    assert "instead of" in kvray("size", "--now", "--add", "16MiB")
