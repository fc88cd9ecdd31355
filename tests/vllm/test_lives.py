"""Random lives of requests beside a tier that lies: every answer is vLLM's own, and none is lost.

Every arena, slab, lease or disk block that a promise could rest on is hurt while requests are
preempted and given up. `LIVES` says how many answers each engine gives; for a long run, 2000.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.store import Arena
from kvray.store.arena.layout import READY
from tests.kit.tier import Tier
from tests.unit.actors.small_shard import open_arena
from tests.unit.connector.conftest import environment
from tests.vllm.lives import Life, Tally, spawn, tally_in, write_model

__all__ = ["environment"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(0)]  # a stuck life says so and ends itself

NUM_ANSWERS = int(os.environ.get("LIVES", "150"))
_EVERY_S = 0.01


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def tier(environment: dict[str, str], disk: Path) -> Iterator[Shard]:
    """A shard with room for a part of what the lives store, and a disk for the rest."""
    os.environ |= {
        "KVRAY_ARENA__CAPACITY": "8MiB",
        "KVRAY_ARENA__SLAB": "1MiB",
        "KVRAY_CONNECTOR__STAGE_WAIT_S": "2",
        "KVRAY_NVME__DIR": str(disk),
        "KVRAY_NVME__CAPACITY": "64MiB",
        "KVRAY_NVME__SEGMENT": "4MiB",
        "KVRAY_NVME__FREE_RESERVE": "1MiB",
        "KVRAY_NVME__ADMISSION": "all",
        "KVRAY_NVME__HIGH_WATERMARK": "0.5",
    }
    made = Tier()
    yield made.shard
    made.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the answers of a vLLM without the connector."""
    made = write_model(tmp_path_factory.mktemp("model"))
    log = made / "plain.log"
    spawn(Life(model=str(made), truth=str(made / "truth.json")), log, {}).wait()
    tally_in(log)
    return made


def flip_bits(arena: Arena, _: Path, chance: random.Random) -> None:
    """Flip a thousand bits of the arena's blocks in one second of four; else they are hit."""
    ready = arena.tables.slots_in(READY)
    for _number in range(10) if len(ready) and time.monotonic() % 4 < 1 else ():
        slot = arena.slot_bytes(int(chance.choice(ready)))
        slot[chance.randrange(len(slot))] ^= 1 << chance.randrange(8)


def take_leases(arena: Arena, _: Path, chance: random.Random) -> None:
    """End leases that others have."""
    pages = np.flatnonzero(arena.tables.page_holder.copy())
    if len(pages):
        arena.release_ids([int(arena.tables.page_lease[chance.choice(pages)])])


def replace_slab(arena: Arena, _: Path, chance: random.Random) -> None:
    """Have one slab's bytes be those of another, which are valid blocks of other keys."""
    data, size = arena.tables.data, arena.tables.geometry.slab_bytes
    source, target = (chance.randrange(len(data) // size) * size for _number in range(2))
    data[target : target + size] = data[source : source + size]


def cut_disk(arena: Arena, disk: Path, chance: random.Random) -> None:
    """Cut blocks of the disk: the rest of a piece of 64 KiB is zeros."""
    files = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 2**20]
    if files:
        with chance.choice(files).open("r+b") as file:
            file.seek(2**20 + chance.randrange(48) * 2**16 + 2**14)
            file.write(bytes(2**15))


ATTACKS = {
    "flipped bits": flip_bits,
    "leases taken away": take_leases,
    "slabs replaced": replace_slab,
    "disk blocks cut": cut_disk,
}

LIVES = {
    "reset": {"policy": "recompute", "reset_share": 0.05, "abort_share": 0.03, "salts": 2},
    "small": {
        "policy": "fail",
        "reset_share": 0.03,
        "abort_share": 0.05,
        "logprobs_share": 0.05,
        "options": {
            "num_gpu_blocks_override": 40,
            "enable_prefix_caching": False,
            "async_scheduling": False,
        },
    },
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_no_answer_is_wrong_lost_or_an_error(attack, tier, disk, model):
    tallies = _live(attack, tier, disk, model)
    for name, tally in tallies.items():
        print(f"{name}: {tally}")
    for tally in tallies.values():
        assert (tally.wrong, tally.errors, tally.overcounted, tally.hung) == ([], [], [], 0)
        assert tally.answers + tally.aborted == NUM_ANSWERS
    assert sum(tally.hit_tokens for tally in tallies.values()) > 0


def _live(
    attack: Callable[[Arena, Path, random.Random], None], tier: Shard, disk: Path, model: Path
) -> dict[str, Tally]:
    """Have engines live side by side, with attacks until all of them have ended."""
    living = {}
    for seed, (name, what) in enumerate(LIVES.items()):
        life = Life(
            model=str(model),
            truth=str(model / "truth.json"),
            num_answers=NUM_ANSWERS,
            seed=seed,
            **what,  # type: ignore[arg-type]
        )
        living[name] = spawn(life, model / f"{name}.log", {"KVRAY_CONNECTOR__REPLICA": name})
    arena, chance = open_arena(tier._settings.directory), random.Random(5)
    try:
        while any(one.poll() is None for one in living.values()):
            attack(arena, disk, chance)
            time.sleep(_EVERY_S)
    finally:
        arena.close()
        for one in living.values():
            one.kill()
            one.wait()
    return {name: tally_in(model / f"{name}.log") for name in living}
