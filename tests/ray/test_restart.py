"""Engines, tier, Ray or code start again, on one node or on several: blocks are still there."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvray
from kvray.config import environ_for
from kvray.lab.chaos import load
from kvray.lab.chaos.judge import hit_share
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from kvray.lab.chaos.servers import Question, Questions, Served, Server, ask_oracle
from kvray.lab.chaos.stalls import read_stalls
from kvray.reference.replica import Replica
from tests.kit.ray.cluster import (
    NUM_BLOCKS,
    PATIENT,
    REPLICA,
    SETTINGS,
    WHOLE_TOKENS,
    TwoNodes,
    open_tier,
    prompt_of,
)
from tests.kit.ray.command_line import Shell, open_shell
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

_SEED = 7


class UnderLoad:
    """The engines, and what they have answered; figures are of the time since a moment."""

    def __init__(self, nodes: TwoNodes) -> None:
        """Begin to start the engines; they are asked as soon as they answer."""
        count = len(nodes.nodes)
        # One phase, again and again: everything is in the tier after the first time.
        workload = load.make_workload(seed=_SEED, num_phases=1, num_replicas=count)
        questions = ask_oracle(workload, lambda done: None)
        self.servers = [
            Server(
                node.name,
                environ=environ_for(nodes.config_path),
                arena_dir=node.arena_dir,
                files=nodes.machine.scratch / node.name,
            )
            for node in nodes.nodes
        ]
        for number, server in enumerate(self.servers):
            server.serve(_batches(workload, number, count, questions))

    def wait_for_batches(self, number: int) -> None:
        """Return when each engine has answered so many more."""
        enough = [len(server.served) + number for server in self.servers]
        wait_for(
            lambda: all(
                len(server.served) >= least
                for server, least in zip(self.servers, enough, strict=True)
            ),
            f"{number} batches",
        )

    def check_well(self) -> None:
        """Check that nothing was wrong, failed, hung or died."""
        assert sum((server.losses for server in self.servers), Counter()) == Counter(), [
            failure for server in self.servers for failure in server.failures
        ]
        assert not any(one.wrong_tokens for server in self.servers for one in server.served)

    def hits(self, since: float, until: float = inf) -> list[float]:
        """Return each engine's share of tokens found in the tier."""
        return [round(hit_share(_within(one, since, until)), 3) for one in self.servers]

    def longest_stall_ms(self, since: float) -> float:
        """Return how long kvray held up an engine's scheduler at most, less waits for a core."""
        stalls = np.concatenate([read_stalls(server.stalls_path) for server in self.servers])
        late = stalls[stalls[:, 1] > since]
        return round(1000.0 * float((late[:, 2] - late[:, 3]).max(initial=0.0)), 1)

    def close(self) -> None:
        """End the engines. Twice is fine."""
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def open_under_load(nodes: TwoNodes) -> Iterator[UnderLoad]:
    """Have the engines of a tier asked for the time of a block, and check every answer.

    All that they are asked is in the tier when it begins.
    """
    with contextlib.closing(UnderLoad(nodes)) as made:
        made.wait_for_batches(2 * load.BATCHES)
        yield made
        made.check_well()


def _within(server: Server, since: float, until: float) -> list[Served]:
    return [one for one in [*server.served] if since < one.began < until]


def _batches(
    workload: list[load.Phase], replica: int, count: int, questions: Questions
) -> Iterator[tuple[int, list[Question]]]:
    for place, asks in load.batches_of(workload, replica=replica, num_replicas=count, seed=_SEED):
        yield place, [questions[ask] for ask in asks]


PROMPT = prompt_of("disk")
CONFIG = """\
arena: {capacity: 16MiB, slab: 4MiB}
nvme: {dir: DIR, capacity: 1GiB, segment: 16MiB, free_reserve: 1MiB}
connector: {model_key: tiny, verify_on_load: always, stage_wait_s: 5}
"""


def answer(shell: Shell) -> tuple[tuple[int, ...], int]:
    """Return what a new engine answers, and how many tokens it had from the tier."""
    environ = {name: value for name, value in shell.environ.items() if name.startswith("KVRAY_")}
    replica = Replica.start("one", env=environ, **REPLICA)
    try:
        (output,) = replica.generate([PROMPT], max_tokens=4)
        wait_for(lambda: shell.shard()["arena"]["blocks"] >= NUM_BLOCKS, "saving")
    finally:
        replica.kill()
    return tuple(output.token_ids), output.hit_tokens


def test_a_prompt_hits_after_the_shard_was_terminated_and_after_everything_was_torn_down():
    with open_shell("restart") as shell:
        del shell.environ["KVRAY_ARENA__CAPACITY"]
        shell.environ["KVRAY_CONFIG"] = str(shell.directory / "kvray.yaml")
        disk = shell.directory / "nvme.yaml"  # a name that the shell does not take for a leftover
        disk.mkdir()
        (shell.directory / "kvray.yaml").write_text(CONFIG.replace("DIR", str(disk)))
        shell.say("up")
        pid = shell.shard()["pid"]
        first, hits = answer(shell)
        assert hits == 0
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end")
        wait_for(lambda: shell.shard()["state"] == "serving", "a new shard")
        assert shell.shard()["nvme"]["recovered_blocks"] >= NUM_BLOCKS, "it has flushed"
        assert answer(shell) == (first, WHOLE_TOKENS), "its arena was adopted"
        shell.say("down")
        assert shell.leftovers() == []
        shell.say("up")
        assert shell.shard()["nvme"]["recovered_blocks"] >= NUM_BLOCKS
        assert answer(shell) == (first, WHOLE_TOKENS)
        shell.say("down", "--no-flush")


# -- two nodes with disks -------------------------------------------------------------------------

WITH_DISK = {
    **PATIENT,
    "nvme": {"capacity": "256MiB", "segment": "16MiB", "free_reserve": "1MiB"},
}


@contextmanager
def replica_on(nodes: TwoNodes, number: int) -> Iterator[Replica]:
    replica = nodes.spawn(number)
    try:
        replica.wait_ready()
        yield replica
    finally:
        replica.kill()


def test_a_prompt_that_one_node_has_flushed_is_a_hit_on_the_other(machine):
    with open_tier(machine, "disks", WITH_DISK) as nodes:
        with replica_on(nodes, 0) as first:
            (expected,) = first.generate([PROMPT], max_tokens=4)
            wait_for(
                lambda: sum(one["arena"]["blocks"] for one in nodes.shards()) >= NUM_BLOCKS,
                "saving",
            )
        nodes.say("down")
        nodes.say("up")
        assert sorted(one["nvme"]["blocks"] for one in nodes.shards()) == [0, NUM_BLOCKS]
        with replica_on(nodes, 1) as second:
            wait_for(
                lambda: nodes.status()["lookup"]["keys"] >= NUM_BLOCKS and nodes.has_movers(),
                "the announcement, and movers",
            )
            (output,) = second.generate([PROMPT], max_tokens=4)
            # While it lives: it reports once a second, and not when it is killed.
            (request,) = json.loads(nodes.say("explain", "--last", "--json"))["requests"]
        assert output.token_ids == expected.token_ids
        assert output.hit_tokens == WHOLE_TOKENS
        found = {Path(shard["directory"]): shard for shard in nodes.shards()}
        flushed, asked = (found[nodes.node_dir(node)] for node in nodes.nodes)
        promoted = [shard["nvme"]["promoted_blocks"] for shard in (flushed, asked)]
        assert promoted == [NUM_BLOCKS - 1, 0]
        assert request["node"] == asked["shard"]
        hit = request["ranges"][0]
        assert (hit["start"], hit["stop"], hit["what"]) == (0, WHOLE_TOKENS, "hit")
        assert hit["source"] == flushed["shard"]
        assert hit["way"] in ("nixl", "object_ref"), "not from a disk of its own"
        (rank,) = asked["replicas"]
        assert rank["counters"][f"hit_tokens_from_{hit['way']}"] == WHOLE_TOKENS


# -- Ray's head, and other code, under load -------------------------------------------------------

BATCHES = 6
NO_NETWORK = why_impossible()


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two nodes whose head has the same address after each start."""
    with Machine(has_network=True) as machine, open_tier(machine, "nodes", SETTINGS) as made:
        yield made


def start_head(machine: Machine) -> None:
    """Start a head where the last one was, as its service manager does."""
    # Ray looks for the old head in this file and among the raylets of the machine, and takes those
    # of the nodes, which are on others in earnest, for its own.
    (machine.directory / "head" / "ray_current_cluster").unlink(missing_ok=True)
    machine.head.start()


def restart_ended(machine: Machine) -> bool:
    """Start the nodes whose Ray has ended, as their service managers do; return whether all run."""
    for node in machine.nodes:
        if not node.ray.is_running:
            node.kill()
            node.ray.begin()
    return all(node.ray.has_started for node in machine.nodes)


def check_kept(nodes: TwoNodes, before: dict[str, dict[str, Any]], *, restarts: int | None) -> None:
    """Check that the arenas are those from before, with no block less."""
    for directory, shard in nodes.serving().items():
        was, now = before[directory]["arena"], shard["arena"]
        assert now["arena_id"] == was["arena_id"]
        assert restarts is None or now["shard_epoch"] == was["shard_epoch"] + restarts
        assert now["blocks"] >= was["blocks"]


@pytest.mark.root
@pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}")
def test_a_head_that_starts_again_finds_the_blocks_and_engines_never_noticed(nodes):
    with open_under_load(nodes) as engines:
        before, began = nodes.serving(), time.monotonic()
        nodes.machine.head.kill()
        time.sleep(5)
        start_head(nodes.machine)
        up = nodes.machine.begin("kvray", "up", "--no-wait", "-c", str(nodes.config_path))
        wait_for(lambda: up.poll() == 0, "kvray up")
        wait_for(
            lambda: restart_ended(nodes.machine) and len(nodes.serving()) == 2,
            "the shards of both nodes",
        )
        back = time.monotonic()
        engines.wait_for_batches(BATCHES)
        check_kept(nodes, before, restarts=None)
        assert min(engines.hits(began, back)) > 0, "engines find what their nodes have"


OTHER = "0.99.0"
CHANGE = f"kvray is {OTHER} now and was {kvray.__version__}."
STALL_MS = 500.0
"""An engine's pass may wait for a fetch, never for a part that restarts."""


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A copy of kvray for each machine, as each has its own; commands find no other one."""
    monkeypatch.chdir(tmp_path)  # Ray's workers look into the directory of a command first
    found = {name: tmp_path / name for name in ("head", "node1", "node2")}
    for path in found.values():
        shutil.copytree(Path(kvray.__file__).parent, path / "kvray")
    return found


@pytest.fixture
def upgraded(sites: dict[str, Path]) -> Iterator[TwoNodes]:
    """A tier whose nodes have a kvray of their own each."""
    with Machine(environ={"PYTHONPATH": str(sites["head"])}) as machine:
        for node in machine.nodes:
            node.kill()
            node.environ["PYTHONPATH"] = str(sites[node.name])
            node.start()
        with open_tier(machine, "nodes", SETTINGS) as made:
            yield made


def install(site: Path) -> None:
    """Install another version over the one that is there."""
    path = site / "kvray" / "__init__.py"
    text = path.read_text()
    assert text.count(kvray.__version__) == 1
    path.write_text(text.replace(kvray.__version__, OTHER))


def test_an_upgrade_node_after_node_is_not_felt_by_engines(upgraded, sites):
    with open_under_load(upgraded) as engines:
        began = time.monotonic()
        before = upgraded.serving()
        assert len(before) == 2
        usual = engines.hits(0.0)
        assert "Nothing would be done" in upgraded.say("up", "--plan")
        told = ""
        for name in ("node1", "node2", "head"):
            install(sites[name])
            assert f"would be restarted: {CHANGE}" in upgraded.say("up", "--plan")
            told += upgraded.say("up")
            # Parts of both versions serve together for a while.
            since = time.monotonic()
            engines.wait_for_batches(BATCHES)
        print(told)
        stall_ms = engines.longest_stall_ms(began)
        shards = [one["shard"] for one in before.values()]
        movers = [name.replace("shard", "mover") for name in shards]
        parts = ("The supervisor", "The lookup", *shards, *movers)
        assert all(f"{part} was restarted: {CHANGE}" in told for part in parts)
        assert told.count("blocks in memory as before") == len(before)
        assert "Nothing would be done" in upgraded.say("up", "--plan")
        check_kept(upgraded, before, restarts=1)
        for share, usually in zip(engines.hits(since), usual, strict=True):
            assert share >= 0.9 * usually
        assert stall_ms < STALL_MS
