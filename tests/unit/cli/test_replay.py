"""`kvray replay`, as a user runs it: its options, and what it says of them."""

import json
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


def replayed(run_kvray: RunKvray, *args: str | Path) -> dict[str, Any]:
    """Run a replay, and return the JSON of it."""
    done = run_kvray("replay", *args, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_order_of_sessions_hangs_on_the_options_and_json_says_which(run_kvray):
    order = ("--concurrent", "1", "--seed", "7")
    found = replayed(run_kvray, SESSIONS, "--capacity", "1k", "--policy", "lru", *order)
    assert (found["concurrent"], found["seed"]) == (1, 7)
    hits = [
        simulate(trace, policy="lru", host_blocks=1000).hit_blocks
        for trace in (read_trace(SESSIONS, concurrent=1, seed=7), excerpt(SESSIONS))
    ]
    assert found["results"][0]["hit_blocks"] == hits[0] != hits[1]


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["5k"], [5000]),
        (["30000", "1k, 5k"], [1000, 5000, 30000]),
        (["1.5M"], [1_500_000]),
        (["1k,1000", "1k"], [1000]),
    ],
)
def test_sizes_are_written_in_thousands_and_millions_and_count_once(texts, sizes):
    assert parse_sizes(texts, "--capacity") == sizes


@pytest.mark.parametrize("text", ["", "k", "-5", "0", "1.5", "0.0001k", "5K", "5 k5", "1e3", "∞"])
def test_what_is_no_number_of_blocks_is_refused(text):
    with pytest.raises(ConfigError, match=r"--capacity: .* is no number of blocks; write"):
        parse_sizes([text], "--capacity")


def test_all_policies_are_replayed_and_a_disk_with_all_admissions(run_kvray):
    found = replayed(run_kvray, SESSIONS, "--capacity", "300,1k")["results"]
    runs = {(one["host_blocks"], one["policy"]) for one in found}
    assert runs == {(size, name) for size in (300, 1000) for name in POLICIES}
    options = ("--capacity", "1k", "--nvme", "2k", "--policy", "gittins")
    found = replayed(run_kvray, SESSIONS, *options)["results"]
    assert all(one["nvme_hit_blocks"] > 0 for one in found)
    runs = {(one["policy"], one["admission"]) for one in found}
    assert runs == {("lru", "all"), *(("gittins", name) for name in ADMISSIONS)}


def test_all_routers_are_compared(run_kvray, tmp_path):
    picture = tmp_path / "routers.png"
    options = ("--replicas", "4", "--speed", "2.5", "--plot", picture)
    found = replayed(run_kvray, CONVERSATION, *options)
    assert [one["router"] for one in found["routers"]] == [*ROUTERS][:4]
    assert (found["num_replicas"], found["speed"], found["pool_blocks"]) == (4, 2.5, 800)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_table_has_a_line_for_each_router_that_was_asked_for(run_kvray):
    options = ("--replicas", "3", "--router", "pow2,kvray", "--nvme", "1k", "--host", "0.2k")
    done = run_kvray("replay", SESSIONS, *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    names = [row[0] for row in rows if row]
    assert names == ["router", "pow2", "kvray", "one"]
    assert "200 in its node's memory and 1,000 on disk" in " ".join(done.stdout.split())
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--capacity", "5kb"], ["--capacity", "'5kb' is no number of blocks", "5k"]),
        (["--capacity", "1k,"], ["'' is no number of blocks"]),
        (["--nvme", "0"], ["--nvme", "'0' is no number of blocks"]),
        (["--policy", "lur"], ["--policy", "'lur'", "did you mean lru?", ", ".join(POLICIES)]),
        (["--nvme", "1k", "--admission", "none"], ["--admission", "'none'", ", ".join(ADMISSIONS)]),
        (["--admission", "all"], ["--admission", "--nvme"]),
        (["--plot", "curves.pdf"], ["curves.pdf", ".png"]),
        (["--plot", "nowhere/curves.png"], ["no directory nowhere"]),
        (["--block-tokens", "16"], ["conversation.jsonl.gz, line 1", "--block-tokens"]),
        (["--speed", "2"], ["--speed", "--replicas"]),
        (["--router", "pow2"], ["--router", "--replicas"]),
        (["--imbalance", "0"], ["--imbalance", "--replicas"]),
        (["--replicas", "2", "--policy", "lru"], ["--policy", "--replicas"]),
        (["--replicas", "2", "--router", "pow"], ["'pow'", "did you mean pow2?"]),
        (["--replicas", "2", "--pool", "many"], ["--pool", "'many' is no number of blocks"]),
        (["--replicas", "2", "--disk-rate", "3"], ["--disk-rate", "--nvme"]),
    ],
)
def test_what_cannot_be_is_refused(run_kvray, args, words):
    assert_refused(run_kvray("replay", CONVERSATION, *args), *words)
