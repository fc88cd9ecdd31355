"""`kvray replay`, as a user runs it: over a simulator of which the hits are known, and for real."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvray.cli.replay import parse_sizes
from kvray.errors import ConfigError
from kvray.lab.replay import belady
from kvray.lab.replay.routers import ROUTERS
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, SYNTHETIC, excerpt, lru_hits
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.unit.cli.replay_stand_in", "replay"]
PNG = b"\x89PNG\r\n\x1a\n"

Replay = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    """Return a function that runs the command in a directory of its own."""

    def run(*args: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *map(str, args)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def assert_refused(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kvray: ")
    assert done.stderr.count("\n") == 1, "one sentence"
    assert all(word in done.stderr for word in words), done.stderr


def test_tier_larger_than_the_trace_costs_no_more_than_the_trace():
    command = [sys.executable, "-m", "kvray", "replay", str(CONVERSATION), "--json"]
    sizes = ("--capacity", "100k,99999999999M", "--nvme", "99999999999M", "--policy", "lru")
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hits = {one["host_blocks"]: one["hit_blocks"] for one in json.loads(done.stdout)["results"]}
    assert hits[99999999999 * 10**6] == hits[10**5] > 0


def test_json_has_every_policy_and_size_beside_the_bounds(replay):
    done = replay(SYNTHETIC, "--capacity", "100,0.3k", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found, trace = json.loads(done.stdout), excerpt(SYNTHETIC)
    assert (found["trace"], found["requests"], found["refs"]) == ("synthetic", 400, 10346)
    assert found["nvme_blocks"] == 0
    by_run = {(one["host_blocks"], one["policy"]): one for one in found["results"]}
    assert set(by_run) == {(size, name) for size in (100, 300) for name in ("lru", "double")}
    assert by_run[300, "lru"]["hit_blocks"] == sum(lru_hits(trace, 300))
    assert by_run[300, "lru"]["refs_per_s"] == 2 * 10346
    assert by_run[300, "lru"]["gain"] == 0 < by_run[300, "double"]["gain"]
    assert by_run[300, "lru"]["written_per_hit"] is by_run[300, "lru"]["write_share"] is None
    most = {one["host_blocks"]: one["hit_blocks"] for one in found["belady"]}
    assert most == {size: belady(trace, size).hit_blocks for size in (100, 300)}
    assert found["infinite"]["hit_blocks"] == trace.num_refs - trace.num_unique
    gains = [by_run[size, "double"]["gain"] for size in (100, 300)]
    mean = {one["policy"]: one["mean_gain"] for one in found["mean_gains"]}
    assert mean == {"lru": 0, "double": pytest.approx(sum(gains) / 2)}
    page = (ROOT / "docs" / "replay.md").read_text()
    keys = {*found, *found["infinite"], *found["belady"][0], *found["results"][0]}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_a_disk_brings_hits_for_each_tier_and_writes(replay):
    done = replay(SYNTHETIC, "--capacity", "300", "--nvme", "1k", "--policy", "lru", "--json")
    assert done.returncode == 0, done.stderr
    found, trace = json.loads(done.stdout), excerpt(SYNTHETIC)
    everything, half = found["results"]
    assert (everything["admission"], half["admission"]) == ("all", "half")
    assert everything["host_hit_blocks"] == sum(lru_hits(trace, 300))
    assert everything["host_hit_blocks"] + everything["nvme_hit_blocks"] == everything["hit_blocks"]
    assert (everything["write_share"], half["write_share"]) == (1, pytest.approx(0.5, abs=0.001))
    assert half["written_per_hit"] == half["nvme_written_blocks"] / half["nvme_hit_blocks"]
    assert found["belady"][0]["blocks"] == 1300


def test_the_table_has_a_line_for_each_run_and_bound(replay):
    done = replay(CONVERSATION, "--capacity", "1000")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["1,000", "lru", "3.5", "%", "3.6", "%", "+0.00", "22,698"] in lines
    most = belady(excerpt(CONVERSATION), 1000)
    percents = [f"{100 * ratio:.1f}" for ratio in (most.hit_ratio, most.token_hit_ratio)]
    assert ["Belady", percents[0], "%", percents[1], "%"] in lines
    assert any(line[:2] == ["∞", "infinite"] for line in lines)
    assert "400 requests" in done.stdout
    assert "Mean gain of double over all sizes: +" in done.stdout


def test_the_table_with_a_disk_is_not_cut(replay):
    done = replay(SYNTHETIC, "--capacity", "100k", "--nvme", "1M")
    assert done.returncode == 0, done.stderr
    assert "double + half" in done.stdout
    assert "of LRU's" in done.stdout
    assert "…" not in done.stdout


def test_picture_is_a_png(replay, tmp_path):
    done = replay(SESSIONS, "--capacity", "1k,3k", "--plot", "curves.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_the_order_of_sessions_hangs_on_the_options_and_json_says_which(replay):
    def found(*options: str) -> dict[str, Any]:
        done = replay(SESSIONS, "--capacity", "1k", "--policy", "lru", "--json", *options)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        assert {one["refs_per_s"] for one in told["results"]} == {2 * told["refs"]}
        return told

    usual, same = found(), found("--concurrent", "16", "--seed", "0")
    other = found("--concurrent", "1", "--seed", "7")
    assert usual["results"] == same["results"]
    assert usual["results"][0]["hit_blocks"] != other["results"][0]["hit_blocks"]
    assert (other["concurrent"], other["seed"]) == (1, 7)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--capacity", "5kb"], ["--capacity", "'5kb' is no number of blocks", "5k"]),
        (["--capacity", "1k,"], ["'' is no number of blocks"]),
        (["--nvme", "0"], ["--nvme", "'0' is no number of blocks"]),
        (["--policy", "lur"], ["--policy", "'lur'", "did you mean lru?", "lru, double"]),
        (["--nvme", "1k", "--admission", "none"], ["--admission", "'none'", "all, half"]),
        (["--admission", "half"], ["--admission", "--nvme"]),
        (["--plot", "curves.pdf"], ["curves.pdf", ".png"]),
        (["--plot", "nowhere/curves.png"], ["no directory nowhere"]),
        (["--block-tokens", "16"], ["conversation.jsonl.gz, line 1", "--block-tokens"]),
    ],
)
def test_what_cannot_be_is_refused(replay, args, words):
    assert_refused(replay(CONVERSATION, *args), *words)


def test_a_trace_that_is_not_there_is_named(replay):
    assert_refused(replay("nowhere.jsonl"), "nowhere.jsonl cannot be read")


def test_interrupt_ends_it_at_once_and_prints_nothing_more(tmp_path):
    command = [*COMMAND, str(CONVERSATION), "--slow", "--json", "--capacity", "10"]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "slow begins\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert (stdout, stderr) == ("", "kvray: interrupted.\n")


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [(["5k"], [5000]), (["30000", "1k, 5k"], [1000, 5000, 30000]), (["1.5M"], [1_500_000])],
)
def test_sizes_are_written_in_thousands_and_millions(texts, sizes):
    assert parse_sizes(texts, "--capacity") == sizes


def test_a_size_counts_once():
    assert parse_sizes(["1k,1000", "1k"], "--capacity") == [1000]


@pytest.mark.parametrize("text", ["", "k", "-5", "0", "1.5", "0.0001k", "5K", "5 k5", "1e3", "∞"])
def test_what_is_no_number_of_blocks_is_refused(text):
    with pytest.raises(ConfigError, match=r"--capacity: .* is no number of blocks; write"):
        parse_sizes([text], "--capacity")


def test_all_policies_are_replayed(run_kvray):
    done = run_kvray("replay", SESSIONS, "--capacity", "300,1k", "--json")
    assert done.returncode == 0, done.stderr
    found, trace = json.loads(done.stdout), excerpt(SESSIONS)
    hits = {(one["host_blocks"], one["policy"]): one["hit_blocks"] for one in found["results"]}
    assert set(hits) == {(size, name) for size in (300, 1000) for name in POLICIES}
    for (size, _), one in hits.items():
        assert 0 < one <= belady(trace, size).hit_blocks
    for size in (300, 1000):  # a tier of this size is kept up to 16 blocks below full
        assert sum(lru_hits(trace, size - 16)) <= hits[size, "lru"] <= sum(lru_hits(trace, size))


def test_a_disk_is_replayed_with_all_admissions(run_kvray):
    done = run_kvray(
        *("replay", SESSIONS, "--capacity", "1k", "--nvme", "2k", "--policy", "gittins", "--json")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    runs = {(one["policy"], one["admission"]): one for one in found["results"]}
    assert set(runs) == {("lru", "all"), *(("gittins", name) for name in ADMISSIONS)}
    for one in runs.values():
        assert one["nvme_hit_blocks"] > 0
        assert one["host_hit_blocks"] + one["nvme_hit_blocks"] == one["hit_blocks"]
    written = {run: one["nvme_written_blocks"] for run, one in runs.items()}
    assert written["gittins", "twice"] <= written["gittins", "all"]


def test_all_routers_are_compared(run_kvray, tmp_path):
    picture = tmp_path / "routers.png"
    done = run_kvray(
        *("replay", CONVERSATION, "--replicas", "4", "--speed", "2.5", "--json", "--plot", picture)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["router"] for one in found["routers"]] == list(ROUTERS)
    assert (found["num_replicas"], found["speed"], found["pool_blocks"]) == (4, 2.5, 800)
    assert picture.read_bytes().startswith(PNG)
    page = (ROOT / "docs" / "replay.md").read_text()
    keys = {*found, *found["one_replica"]}
    assert {key for key in keys if f"`{key}`" not in page} == set()


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
    ("options", "words"),
    [
        (("--speed", "2"), ("--speed", "--replicas")),
        (("--router", "pow2"), ("--router", "--replicas")),
        (("--imbalance", "0"), ("--imbalance", "--replicas")),
        (("--replicas", "2", "--policy", "lru"), ("--policy", "--replicas")),
        (("--replicas", "2", "--router", "pow"), ("'pow'", "did you mean pow2?")),
        (("--replicas", "2", "--pool", "many"), ("--pool", "'many' is no number of blocks")),
        (("--replicas", "2", "--disk-rate", "3"), ("--disk-rate", "--nvme")),
    ],
)
def test_options_that_do_not_go_together_are_refused(run_kvray, options, words):
    done = run_kvray("replay", CONVERSATION, *options)
    assert_refused(done, *words)
