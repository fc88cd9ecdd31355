"""Engines that share prompts through a tier, and what `kvray explain`, `ls` and `top` say of it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvray.actors.tier.local_ray import LocalRay
from kvray.cli.app import app
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.reference.engine import ReferenceEngine
from tests.ray.cluster import CONNECTOR
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

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


def await_saved(client: Client) -> None:
    """Return when the blocks of a prompt are stored."""
    wait_for(lambda: num_blocks(client) >= len(PROMPT) // BLOCK, "saving")


def num_blocks(client: Client) -> int:
    (shard,) = client.status()["shards"]
    return int(shard["arena"]["blocks"])


def latest(client: Client, replica: str) -> dict[str, Any]:
    (request,) = client.explain(replica=replica)["requests"]
    found: dict[str, Any] = request
    return found


def kvray(*args: str) -> str:
    """Return what a command prints; it uses the connection of this process."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_requests_are_explained_from_the_first_hit_to_what_went_and_who_had_it_go(
    local: LocalRay, running: KVRayConfig, ask: Ask, tmp_path: Path
) -> None:
    client = Client(running)

    # Never stored, and then a hit at another replica.
    assert ask("tiny-one", PROMPT) == 0
    await_saved(client)
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
    await_saved(client)
    (stored,) = client.explain_tokens(PROMPT[:160] + OTHER[:100])["prompts"]
    assert (stored["stored_tokens"], stored["reason"]) == (160, "never_stored")
    assert [one["what"] for one in stored["ranges"]] == ["stored", "never_stored", "computed"]

    # As people see it.
    of_two = kvray("explain", "--last", "--replica", "tiny-two")
    assert f"{HIT} of {len(PROMPT)} tokens were hits (in the node's memory already)" in of_two
    listed = kvray("explain", "--last", "4")
    assert all(name in listed for name in ("tiny-one", "evicted"))
    (tmp_path / "prompt.txt").write_text(" ".join(map(str, PROMPT)))
    found = json.loads(kvray("explain", "--tokens", str(tmp_path / "prompt.txt"), "--json"))
    assert {one["stored_tokens"] for one in found["prompts"]} == {len(PROMPT)}
    unknown = CliRunner().invoke(app, ["explain", "987654"])
    assert unknown.exit_code == 2
    assert "No request 987654 is known" in unknown.stderr


def test_what_is_stored_and_used_most_is_listed(
    local: LocalRay, running: KVRayConfig, ask: Ask
) -> None:
    client = Client(running)
    ask("tiny-one", PROMPT)
    await_saved(client)
    ask("tiny-two", PROMPT[:170])

    (namespace,) = json.loads(kvray("ls", "--json"))["namespaces"]
    assert sorted(namespace["replicas"]) == ["tiny-one", "tiny-two"]
    assert namespace["host_blocks"] >= len(PROMPT) // BLOCK
    assert namespace["fields"]["model"] == "key:tiny"
    assert "key:tiny" in kvray("ls")

    def hottest() -> dict[str, Any]:
        found = json.loads(kvray("ls", namespace["namespace"], "--hottest", "1", "--json"))
        return dict(found["prefixes"][0])

    wait_for(lambda: hottest()["uses"] == 1, "seeing the use")
    assert hottest()["num_blocks"] == 170 // BLOCK
    assert "160" in kvray("ls", namespace["namespace"])
    assert CliRunner().invoke(app, ["ls", "none"]).exit_code == 2


def test_what_memory_would_be_worth_is_said_once_there_is_traffic(
    local: LocalRay, running: KVRayConfig, ask: Ask
) -> None:
    assert "Too little traffic" in kvray("size")
    for turn in range(8):
        for prompt in (PROMPT, OTHER):
            ask(f"tiny-{turn % 2}", prompt)

    def found() -> list[dict[str, Any]]:
        return list(json.loads(kvray("size", "--now", "--json"))["namespaces"])

    wait_for(lambda: found() and found()[0]["sampled_blocks"] >= 16 * 19, "the engines' reports")
    (entry,) = found()
    assert entry["model"] == "key:tiny"
    assert entry["host_bytes"] == running.arena.capacity
    # Each engine computes one prompt and its own pool has most of what comes again.
    assert entry["own"] > 0.4
    assert 0.8 < entry["own"] + entry["host"][-1] < 1
    assert entry["error"][-1] == 0, "so few prompts are all in the sample"
    assert "of prompt tokens hit" in kvray("size", "--now")
    assert "instead of" in kvray("size", "--now", "--add", "16MiB")
