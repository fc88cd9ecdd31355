"""`kvray replay --replicas N`, as a user runs it."""

import json
from pathlib import Path

import pytest

from kvray.lab.replay.fleet import ROUTERS
from tests.forks import RunKvray
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS

ROOT = Path(__file__).parents[3]


def test_all_routers_are_compared(run_kvray: RunKvray, tmp_path: Path) -> None:
    picture = tmp_path / "routers.png"
    done = run_kvray(
        *("replay", CONVERSATION, "--replicas", "4", "--speed", "2.5", "--json", "--plot", picture)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["router"] for one in found["routers"]] == list(ROUTERS)
    assert (found["num_replicas"], found["speed"], found["pool_blocks"]) == (4, 2.5, 800)
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = (ROOT / "docs" / "replay.md").read_text()
    keys = {*found, *found["one_replica"]}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_the_table_has_a_line_for_each_router_that_was_asked_for(run_kvray: RunKvray) -> None:
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
def test_what_cannot_be_is_refused(
    run_kvray: RunKvray, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = run_kvray("replay", CONVERSATION, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, "one sentence"
    assert all(word in done.stderr for word in words), done.stderr
