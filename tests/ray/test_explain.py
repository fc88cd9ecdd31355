"""Engines that share prompts through a tier, and what `kvray explain` says of their requests."""

import contextlib
import json
from collections.abc import Callable, Iterator

import pytest

from kvray.actors.local_ray import LocalRay
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.reference.replica import Replica
from tests.ray.cluster import CONNECTOR
from tests.ray.command_line import open_shell
from tests.unit.actors.small_shard import wait_for

pytestmark = pytest.mark.ray

BLOCK = 16
PROMPT = [number * 7 % 250 + 1 for number in range(320)]
OTHER = [number * 11 % 250 + 1 for number in range(320)]
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK

Start = Callable[..., Replica]


@pytest.fixture
def start(running: KVRayConfig) -> Iterator[Start]:
    """Starts replicas on the tier that is up, and ends them."""
    with contextlib.ExitStack() as ended:

        def begin(name: str, **options: int) -> Replica:
            replica = Replica.start(
                name,
                env={
                    "KVRAY_CLUSTER_NAME": running.cluster_name,
                    "KVRAY_CONNECTOR__MODEL_KEY": name.partition("-")[0],
                    "KVRAY_CONNECTOR__REPLICA": name,
                },
                model="tiny:11",
                num_blocks=64,
                connector=CONNECTOR,
                num_threads=1,
                **{"tokens_per_block": BLOCK, **options},
            )
            ended.callback(replica.kill)
            return replica

        yield begin


def ask(client: Client, replica: Replica, prompt: list[int]) -> int:
    """Have a prompt answered and saved; return its hit tokens."""
    (output,) = replica.generate([prompt], max_tokens=2)
    return int(output.hit_tokens)


def num_blocks(client: Client) -> int:
    (shard,) = client.status()["shards"]
    return int(shard["arena"]["blocks"])


def test_requests_are_explained_from_the_first_hit_to_what_went_and_who_had_it_go(
    local: LocalRay, running: KVRayConfig, start: Start
) -> None:
    client = Client(running)
    one, two = start("tiny-one"), start("tiny-two")

    # Never stored, and then a hit at another replica.
    assert ask(client, one, PROMPT) == 0
    wait_for(lambda: num_blocks(client) >= len(PROMPT) // BLOCK, "saving")
    assert ask(client, two, PROMPT) == HIT
    (first,) = client.explain(replica="tiny-one")["requests"]
    assert (first["reason"], first["hit_tokens"]) == ("never_stored", 0)
    assert first["missed_tokens"] == HIT
    (hit,) = client.explain(replica="tiny-two")["requests"]
    assert (hit["hit_tokens"], hit["missed_tokens"], hit["reason"]) == (HIT, 0, "none")
    assert hit["ranges"][0] == {"start": 0, "stop": HIT, "what": "hit", "way": "host", "source": ""}
    assert hit["namespace"] == first["namespace"]

    # Evicted, with time and by whom.
    assert client.clear() >= len(PROMPT) // BLOCK
    three = start("tiny-three")
    assert ask(client, three, PROMPT) == 0
    (gone,) = client.explain(replica="tiny-three")["requests"]
    assert gone["reason"] == "evicted"
    (missed,) = [one for one in gone["ranges"] if one["what"] == "miss"]
    assert (missed["start"], missed["stop"], missed["left_by"]) == (0, HIT, "cleared")
    assert first["at"] < missed["left_at"][0] <= missed["left_at"][1] < gone["at"]

    # A prompt, without a request: what is there, and what never was.
    wait_for(lambda: num_blocks(client) >= len(PROMPT) // BLOCK, "saving")
    (stored,) = client.explain_tokens(PROMPT[:160] + OTHER[:100])["prompts"]
    assert (stored["stored_tokens"], stored["reason"]) == (160, "never_stored")
    assert [one["what"] for one in stored["ranges"]] == ["stored", "never_stored", "computed"]

    # The same text in another namespace.
    far = start("far-four", tokens_per_block=32)
    assert ask(client, far, PROMPT) == 0
    wait_for(
        lambda: client.explain(replica="far-four")["requests"][0]["reason"] == "incompatible",
        "the lookup's finding",
    )
    (other,) = client.explain(replica="far-four")["requests"]
    assert other["incompatible"]["difference"]["tokens_per_block"] == [32, BLOCK]

    # As people see it.
    with open_shell("explain") as shell:
        environ = {"KVRAY_CLUSTER_NAME": running.cluster_name, **local.environ()}
        where = ("--address", local.address)
        shown = shell.run("explain", str(hit["request_id"]), *where, **environ)
        assert shown.returncode == 0, shown.stderr
        assert f"{HIT} of {len(PROMPT)} tokens were hits (was in the node's memory)" in shown.stdout
        listed = shell.run("explain", "--last", "4", *where, **environ)
        assert listed.returncode == 0, listed.stderr
        assert all(name in listed.stdout for name in ("tiny-one", "evicted", "incompatible"))
        prompt = shell.directory / "prompt.yaml"  # a name that the shell does not take for its own
        prompt.write_text(" ".join(map(str, PROMPT)))
        found = shell.run("explain", "--tokens", str(prompt), "--json", *where, **environ)
        assert {one["stored_tokens"] for one in json.loads(found.stdout)["prompts"]} == {320}
        unknown = shell.run("explain", "987654", *where, **environ)
        assert unknown.returncode == 2
        assert "No request 987654 is known" in unknown.stderr
