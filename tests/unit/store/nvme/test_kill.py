"""kill -9 at any moment: all that was found before is found after, and nothing wrong is served."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvray.errors import ShardUnavailable
from tests.unit.store.conftest import ROOT
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.crashing import ASKED, CHAINS
from tests.unit.store.nvme.small_store import open_store, promote


def live_and_die(directory: Path, seed: int, life_s: float) -> set[str]:
    """Run a process on `directory` for a while and kill it; return what must be there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.store.nvme.crashing", str(directory), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    killer = time.monotonic() + life_s
    lines = [first]
    while time.monotonic() < killer:
        lines.append(process.stdout.readline())
    process.kill()
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait() == -9, "the process failed; its traceback is above"
    lines += rest.splitlines(keepends=True)
    return _must_be_there([line for line in lines if line.endswith("\n")])


def _must_be_there(lines: list[str]) -> set[str]:
    kept: set[str] = set()
    for line in lines:
        what, *names = line.rstrip("\n").split("\t")
        if what == "ready":
            kept = {name for name in names if name}
        elif "*" in names:
            kept = set()
        else:
            kept -= set(names)
    return kept


def found_after(directory: Path) -> set[str]:
    """Open what a death has left and read all of it; return the blocks that are right."""
    store = open_store(directory, ASKED)
    check_invariants(store.tables)
    assert (store.report.damaged, store.report.truncated, store.report.aside) == (0, 0, ())
    found = set()
    for (part, size), keys in CHAINS.items():
        sound = promote(store, keys, part=part, block_bytes=size).sound
        found |= {f"{part}/{size}/{row}" for row, good in enumerate(sound) if good}
    store.close()
    return found


def run(directory: Path, seed: int, *, num_lives: int) -> None:
    chance = random.Random(seed)
    for life in range(num_lives):
        kept = live_and_die(directory, 1000 * seed + life, chance.uniform(0.0, 0.4))
        assert not kept - found_after(directory), "blocks that were found before are lost"


def test_killed_process_loses_no_block_and_leaves_none_that_is_wrong(directory: Path) -> None:
    run(directory, 1, num_lives=4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_deaths(directory: Path, seed: int) -> None:
    run(directory, seed, num_lives=25)


def test_living_process_keeps_others_out(directory: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.store.nvme.crashing", str(directory), "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ShardUnavailable, match=f"Process {process.pid} owns"):
        open_store(directory, ASKED)
    process.kill()
    process.stdout.close()
    process.wait()
    open_store(directory, ASKED).close()
