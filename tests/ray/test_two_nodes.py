"""Replicas on two nodes: what one has computed is brought to the other, and promised there."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvray.errors import ShardUnavailable
from kvray.lab.chaos.machine import Machine
from kvray.node.stage_calls import ShardSocket
from tests.kit.ray.cluster import (
    NUM_BLOCKS,
    OFTEN,
    PATIENT,
    WHOLE_TOKENS,
    Sharing,
    again_and_again,
    counters_of,
    node_of,
    open_sharing,
    open_tier,
    prompt_of,
    scrape,
    total,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

TIER = "shared"
REPORTED_S = 2.0
"""Engines report what they count once a second."""
QUOTA = "32MiB"
"""More than the tests store, so that nothing goes for it."""


@pytest.fixture(scope="module", params=["nixl", pytest.param("object_ref", marks=pytest.mark.long)])
def sharing(
    request: pytest.FixtureRequest, machine: Machine, tmp_path_factory: Any
) -> Iterator[Sharing]:
    """Two replicas on nodes that have NIXL, or that have not."""
    with contextlib.ExitStack() as stack:
        if request.param != "nixl":
            environ = {**OFTEN, **_without_nixl(tmp_path_factory.mktemp("absent"))}
            machine = stack.enter_context(Machine(environ=environ))
        nodes = stack.enter_context(open_tier(machine, TIER, PATIENT))
        yield stack.enter_context(open_sharing(nodes))


def _without_nixl(directory: Path) -> dict[str, str]:
    """Return variables of a node that has no NIXL: what is found first cannot be imported."""
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (directory / f"{name}.py").write_text(
            'raise ModuleNotFoundError("not on this node", name=__name__)\n'
        )
    return {"PYTHONPATH": str(directory)}


@pytest.fixture
def way(sharing: Sharing, request: pytest.FixtureRequest) -> str:
    """The transport that the nodes use."""
    return str(request.node.callspec.params["sharing"])


def test_a_prefetched_prompt_is_there_when_the_engine_asks(sharing, tmp_path):
    prompt = prompt_of("prefetched")
    expected = sharing.compute(prompt)
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(prompt))
    name = sharing.second.name

    said = sharing.say("prefetch", str(tokens), "--replica", name, "--json")

    assert json.loads(said) == {
        "num_tokens": 640,
        "staged_tokens": 640,
        "reason": "none",
        "sources": [[640, "remote"]],
    }
    (output,) = sharing.second.generate([prompt], max_tokens=4)
    assert tuple(output.token_ids) == expected
    assert output.hit_tokens == WHOLE_TOKENS


def test_a_prompt_of_one_node_is_a_hit_on_the_other_and_all_say_by_what_it_came(sharing, way):
    first, second = sharing.shards()
    name, hits = sharing.second.name, f"hit_tokens_from_{way}"
    # A mover that does not answer for a second, on a machine that stalls, is given up, though its
    # blocks come: how they came is not known then, and another prompt is tried.
    for attempt in range(3):
        expected = sharing.compute(prompt := prompt_of(f"counted {attempt}"))
        time.sleep(REPORTED_S)
        second = sharing.shards()[1]
        hits_before, moved_before = counters_of(second, name).get(hits, 0), _moved(second, way)
        (output,) = sharing.second.generate([prompt], max_tokens=4)
        assert (tuple(output.token_ids), output.hit_tokens) == (expected, WHOLE_TOKENS)
        if _moved(sharing.shards()[1], way) > moved_before:
            break

    said = json.loads(sharing.say("explain", "--last", "--replica", name, "--json"))
    ((explained,), silent) = said["requests"], said["silent"]
    came = {"what": "hit", "way": way, "source": first["shard"]}
    assert explained["ranges"][0] == {"start": 0, "stop": WHOLE_TOKENS, **came}
    assert [one["what"] for one in explained["ranges"]] == ["hit", "computed"]
    assert (explained["node"], explained["replica"], silent) == (second["shard"], name, [])
    second = sharing.shards()[1]
    hit, moved = counters_of(second, name)[hits], _moved(second, way)
    (size,) = {use["block_bytes"] for use in second["arena"]["slabs"]}
    assert (hit - hits_before, moved - moved_before) == (WHOLE_TOKENS, (NUM_BLOCKS - 1) * size)
    assert list(second["staging"]["transports"]) == [way]
    rank = {"node": node_of(second), "replica": name, "rank": "0", "tier": "remote"}
    machine, (here, there) = sharing.nodes.machine, sharing.nodes.nodes

    def are_exported() -> bool:
        """Whether both nodes' metrics say so of that replica, and of the whole tier.

        The source has also sent what was given up as late.
        """
        received, sent = (
            scrape(machine.directory / there.name),
            scrape(machine.directory / here.name),
        )
        this = {"cluster_name": TIER}
        hits = [
            total(received, "hit_tokens_total", transport=way, **rank, **this),
            total(received, "hit_tokens_total", tier="remote", **this),
        ]
        came = [
            total(received, "moved_bytes_total", transport=way, direction="in", **this),
            total(received, "moved_bytes_total", node=node_of(second), **this),
        ]
        went = [
            total(sent, "moved_bytes_total", transport=way, direction="out", **this),
            total(sent, "moved_bytes_total", node=node_of(first), **this),
        ]
        return hits == [hit] * 2 and came == [moved] * 2 and went[0] == went[1] >= moved

    wait_for(are_exported, f"exporting {hit} tokens and {moved} bytes")
    wait_for(
        lambda: any(one["copies"]["extra_bytes"] for one in sharing.shards()),
        "telling extra copies from originals",
    )


def _moved(shard: dict[str, Any], way: str) -> int:
    """Return the bytes that a shard had brought by one transport."""
    return int(shard["staging"]["transports"].get(way, {"bytes": 0})["bytes"])


def test_doctor_says_which_transport_is_used_and_why(sharing, way):
    ways = json.loads(sharing.say("doctor", "--json"))["transports"]

    assert [one["transport"] for one in ways] == [way] * 2
    for one in ways if way == "object_ref" else ():
        assert f"{one['source']} has no nixl: NIXL is not installed" in one["why"]


@pytest.mark.parametrize("sharing", ["nixl"], indirect=True)
def test_a_node_that_is_drained_by_hand_gives_another_what_only_it_has(sharing):
    prompt = prompt_of("drained")
    expected = sharing.compute(prompt)
    first, second = sharing.shards()
    name, brought = node_of(first), second["arena"]["blocks"]

    assert "is drained and may be removed: " in sharing.say("drain", name, "--deadline", "60")
    first, second = sharing.shards()
    assert second["arena"]["blocks"] >= brought + NUM_BLOCKS
    assert first["drain"]["by"] == ["kvray drain"]
    assert "is drained" in sharing.say("status")
    sharing.say("drain", name, "--cancel")
    assert not sharing.shards()[0].get("drain")
    (output,) = sharing.second.generate([prompt], max_tokens=4)
    assert (tuple(output.token_ids), output.hit_tokens) == (expected, WHOLE_TOKENS)
    wrong = sharing.nodes.machine.run("drain", "0123", "-c", str(sharing.nodes.config_path))
    assert wrong.returncode == 2
    assert name in wrong.stderr


def _check_order(said: str, before: list[dict[str, Any]]) -> None:
    """Check that each node's parts were restarted, one after the other, and why."""
    lines = [line.partition(" was restarted: ") for line in said.splitlines()]
    made = {who: why for who, found, why in lines if found}
    ids = sorted(node_of(shard) for shard in before)
    parts = [
        f"kvray-{kind}-{ids[at]} ({at + 1} of 2)" for at in (0, 1) for kind in ("shard", "mover")
    ]
    assert list(made) == ["The supervisor", *parts]
    assert all("staging.fetches_max is 3 now and was 4" in why for why in made.values())
    kept = [f" {shard['arena']['blocks']} blocks in memory as before." for shard in before]
    assert all(text in said for text in kept)


@contextlib.contextmanager
def outages(sharing: Sharing) -> Iterator[list[tuple[bool, ...]]]:
    """Give which shards were away, each time that it was others than before, as sockets say."""
    sockets = [ShardSocket(sharing.nodes.node_dir(node)) for node in sharing.nodes.nodes]
    seen: list[tuple[bool, ...]] = []

    def is_away(socket: ShardSocket) -> bool:
        try:
            socket.call("hello", timeout_s=5.0)  # if there is a shard, however slow; else at once
        except ShardUnavailable:
            return True
        return False

    def look(_: int) -> None:
        now = tuple(is_away(one) for one in sockets)
        if not seen or now != seen[-1]:
            seen.append(now)

    with again_and_again(look, pause_s=0.01):
        yield seen
    for one in sockets:
        one.close()


@pytest.mark.long
@pytest.mark.parametrize("sharing", ["nixl"], indirect=True)
def test_other_settings_come_node_after_node_and_blocks_stay_on_both(sharing):
    """Comes last: with their processes, what shards and movers say they have moved starts over."""
    first, second = sharing.first, sharing.second
    prompts = prompt_of("computed on the first"), prompt_of("computed on the second")
    expected = sharing.compute(prompts[0]), sharing.compute(prompts[1], second)
    before = sharing.shards()
    quota = {"label": f"ray.io/node-id={before[1]['node_id']}", "arena": {"namespace_quota": QUOTA}}
    path = sharing.nodes.config_path
    changed = {**yaml.safe_load(path.read_text()), "staging": {"fetches_max": 3}, "nodes": [quota]}
    path.write_text(yaml.safe_dump(changed))

    with outages(sharing) as seen:
        said = sharing.say("up")

    _check_order(said, before)
    nobody, one, other = (False, False), (True, False), (False, True)
    if before[0]["node_id"] > before[1]["node_id"]:
        one, other = other, one
    assert seen == [nobody, one, nobody, other, nobody]
    assert "Nothing would be done" in sharing.say("up", "--plan")
    wait_for(sharing.is_ready, "movers and replicas")
    after = sharing.shards()
    for was, now in zip(before, after, strict=True):
        assert now["arena"]["arena_id"] == was["arena"]["arena_id"]
        assert now["arena"]["shard_epoch"] == was["arena"]["shard_epoch"] + 1
        assert now["arena"]["blocks"] == was["arena"]["blocks"]
        assert now["pid"] != was["pid"]
    quotas = [{one["quota_bytes"] for one in shard["arena"]["namespaces"]} for shard in after]
    assert quotas == [{None}, {32 * 2**20}]
    for asked, prompt, tokens in zip((second, first), prompts, expected, strict=True):
        (output,) = asked.generate([prompt], max_tokens=4)
        assert (tuple(output.token_ids), output.hit_tokens) == (tokens, WHOLE_TOKENS)
