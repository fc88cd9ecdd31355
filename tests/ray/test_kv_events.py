"""KV events of two replicas on two nodes, heard by Dynamo's router and by a plain subscriber."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from kvray.lab.chaos.machine import Machine
from tests.kit.ray.cluster import (
    NUM_BLOCKS,
    SETTINGS,
    TOKENS_PER_BLOCK,
    Sharing,
    open_sharing,
    open_tier,
    prompt_of,
)
from tests.kit.ray.command_line import free_port
from tests.kit.ray.selection import Selection
from tests.kv_subscriber import KvSubscriber
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]


@dataclass
class Heard:
    """Two replicas, and who hears of their blocks."""

    sharing: Sharing
    selection: Selection
    subscribers: list[KvSubscriber]

    def places(self) -> list[list[str]]:
        """Return the addresses of each replica's events."""
        sharing = self.sharing
        return [
            shard["events"]["replicas"][replica.name]
            for replica, shard in zip(
                (sharing.first, sharing.second), sharing.shards(), strict=True
            )
        ]

    def wait_for_overlaps(self, prompt: list[int], first: int, second: int) -> None:
        wait_for(
            lambda: self.selection.overlaps(prompt) == {1: first, 2: second},
            f"{first} and {second} blocks, at last {self.selection.overlaps(prompt)}",
        )

    def wait_for_what_ls_shows(self) -> None:
        """Wait until the subscribers together have as many blocks as `kvray ls` lists."""

        def is_right() -> bool:
            said = json.loads(self.sharing.say("ls", "--json"))["namespaces"]
            for subscriber in self.subscribers:
                subscriber.read(0.1)
            heard = [
                sum(len(one.content[medium]) for one in self.subscribers)
                for medium in ("CPU", "STORAGE")
            ]
            listed = [sum(one[f"{tier}_blocks"] for one in said) for tier in ("host", "nvme")]
            return heard == listed

        wait_for(is_right, "the blocks that ls shows")


@pytest.fixture(scope="module")
def heard(machine: Machine) -> Iterator[Heard]:
    settings = {
        **SETTINGS,
        "arena": {**SETTINGS["arena"], "capacity": "4MiB", "slab": "1MiB"},
        "connector": {**SETTINGS["connector"], "stage_wait_s": 0},
        "events": {"port": free_port() + 1000},
    }
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(open_tier(machine, "events", settings))
        sharing = stack.enter_context(open_sharing(nodes))
        selection = stack.enter_context(contextlib.closing(Selection()))
        made = Heard(sharing, selection, [])
        wait_for(lambda: _are_published(sharing.shards()), "the replicas' ports")
        for worker, place in enumerate(made.places(), start=1):
            selection.add(worker, *place, block_size=TOKENS_PER_BLOCK)
            made.subscribers.append(stack.enter_context(KvSubscriber(*place)))
        yield made


def _are_published(shards: list[dict[str, Any]]) -> bool:
    return all(len(shard.get("events", {}).get("replicas", [])) == 1 for shard in shards)


def test_dynamo_chooses_the_replica_whose_node_has_the_prefix(heard):
    ours, theirs = prompt_of("ours"), prompt_of("theirs")
    heard.sharing.first.generate([ours], max_tokens=2)
    heard.sharing.second.generate([theirs], max_tokens=2)

    heard.wait_for_overlaps(ours, NUM_BLOCKS, 0)
    heard.wait_for_overlaps(theirs, 0, NUM_BLOCKS)
    assert heard.selection.choose(ours) == 1
    assert heard.selection.choose(theirs) == 2
    heard.wait_for_what_ls_shows()


def test_a_shard_that_is_killed_and_comes_back_is_heard_of_as_before_until_it_is_cleared(heard):
    prompt = prompt_of("kept")
    heard.sharing.first.generate([prompt], max_tokens=2)
    heard.wait_for_overlaps(prompt, NUM_BLOCKS, 0)
    before = heard.places()
    first = heard.sharing.shards()[0]
    psutil.Process(first["pid"]).kill()

    wait_for(
        lambda: _are_published(heard.sharing.status()["shards"]) and heard.places() == before,
        "the shard's return",
    )
    later = prompt_of("later")
    heard.sharing.first.generate([later], max_tokens=2)
    heard.wait_for_overlaps(later, NUM_BLOCKS, 0)
    heard.wait_for_overlaps(prompt, NUM_BLOCKS, 0)
    heard.wait_for_what_ls_shows()
    heard.sharing.say("clear", "--yes")
    heard.wait_for_overlaps(prompt, 0, 0)
    heard.wait_for_what_ls_shows()
