"""`kvray replay`, as a user runs it: its options, and what it says of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvray.cli.replay import parse_sizes
from kvray.errors import ConfigError
from kvray.lab.replay import read_trace
from kvray.lab.replay.routers import ROUTERS
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES, simulate
from tests.forks import RunKvray, assert_refused
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, excerpt


@pytest.fixture
def replayed(run_kvray: RunKvray) -> Callable[..., dict[str, Any]]:
    """Runs a replay; returns the JSON of it."""

    def run_replay(path: Path, options: str) -> dict[str, Any]:
        done = run_kvray("replay", path, *options.split(), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return run_replay


def test_the_order_of_sessions_hangs_on_the_options_and_json_says_which(replayed):
    found = replayed(SESSIONS, "--capacity 1k --policy lru --concurrent 1 --seed 7")
    assert (found["concurrent"], found["seed"]) == (1, 7)
    hits = [
        simulate(trace, policy="lru", host_blocks=1000).hit_blocks
        for trace in (read_trace(SESSIONS, concurrent=1, seed=7), excerpt(SESSIONS))
    ]
    assert found["results"][0]["hit_blocks"] == hits[0] != hits[1]


def test_sizes_are_written_in_thousands_and_millions_and_count_once():
    assert parse_sizes(["30000", "1k, 5k"], "--capacity") == [1000, 5000, 30000]
    assert parse_sizes(["1.5M", "1k,1000", "1k"], "--capacity") == [1000, 1_500_000]
    for text in ("", "k", "-5", "0", "1.5", "0.0001k", "5K", "5 k5", "1e3", "∞"):
        with pytest.raises(ConfigError, match=r"--capacity: .* is no number of blocks; write"):
            parse_sizes([text], "--capacity")


def test_all_policies_are_replayed_and_a_disk_with_all_admissions(replayed):
    found = replayed(SESSIONS, "--capacity 300,1k")["results"]
    runs = {(one["host_blocks"], one["policy"]) for one in found}
    assert runs == {(size, name) for size in (300, 1000) for name in POLICIES}
    found = replayed(SESSIONS, "--capacity 1k --nvme 2k --policy gittins")["results"]
    assert all(one["nvme_hit_blocks"] > 0 for one in found)
    runs = {(one["policy"], one["admission"]) for one in found}
    assert runs == {("lru", "all"), *(("gittins", name) for name in ADMISSIONS)}


def test_all_routers_are_compared(replayed, tmp_path):
    found = replayed(CONVERSATION, "--replicas 4 --speed 2.5 --plot routers.png")
    assert [one["router"] for one in found["routers"]] == [*ROUTERS][:4]
    assert (found["num_replicas"], found["speed"], found["pool_blocks"]) == (4, 2.5, 800)
    assert (tmp_path / "routers.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_table_has_a_line_for_each_router_that_was_asked_for(run_kvray):
    options = "--replicas 3 --router pow2,kvray --nvme 1k --host 0.2k"
    done = run_kvray("replay", SESSIONS, *options.split())
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    names = [row[0] for row in rows if row]
    assert names == ["router", "pow2", "kvray", "one"]
    assert "200 in its node's memory and 1,000 on disk" in " ".join(done.stdout.split())
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--capacity 5kb", ["--capacity", "'5kb' is no number of blocks", "5k"]),
        ("--capacity 1k,", ["'' is no number of blocks"]),
        ("--nvme 0", ["--nvme", "'0' is no number of blocks"]),
        ("--policy lur", ["--policy", "'lur'", "did you mean lru?", ", ".join(POLICIES)]),
        ("--nvme 1k --admission none", ["--admission", "'none'", ", ".join(ADMISSIONS)]),
        ("--admission all", ["--admission", "--nvme"]),
        ("--plot curves.pdf", ["curves.pdf", ".png"]),
        ("--plot nowhere/curves.png", ["no directory nowhere"]),
        ("--block-tokens 16", ["conversation.jsonl.gz, line 1", "--block-tokens"]),
        ("--speed 2", ["--speed", "--replicas"]),
        ("--router pow2", ["--router", "--replicas"]),
        ("--imbalance 0", ["--imbalance", "--replicas"]),
        ("--replicas 2 --policy lru", ["--policy", "--replicas"]),
        ("--replicas 2 --router pow", ["'pow'", "did you mean pow2?"]),
        ("--replicas 2 --pool many", ["--pool", "'many' is no number of blocks"]),
        ("--replicas 2 --disk-rate 3", ["--disk-rate", "--nvme"]),
    ],
)
def test_what_cannot_be_is_refused(run_kvray, options, words):
    assert_refused(run_kvray("replay", CONVERSATION, *options.split()), *words)
