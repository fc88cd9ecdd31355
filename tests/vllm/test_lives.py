"""Random lives of requests beside a tier whose memory lies: every answer is vLLM's own."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.shard.shard import Shard
from kvray.lab.reference.replica import Replica
from kvray.store.arena.layout import READY
from tests.unit.actors.small_shard import open_arena
from tests.unit.connector.conftest import environment, start_shard
from tests.vllm.lives import Prompt, Tally, answers_of, begin, beside, live, prompts_of, write_model
from tests.vllm.witness import stop

__all__ = ["environment"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(3600)]

NUM_ANSWERS = int(os.environ.get("KVRAY_LIVES", "300"))
"""Of each engine, each time."""


@pytest.fixture(scope="module")
def shard(environment: dict[str, str]) -> Iterator[Shard]:
    os.environ["KVRAY_ARENA__CAPACITY"] = "16MiB"
    os.environ["KVRAY_ARENA__SLAB"] = "1MiB"
    made = start_shard()
    yield made
    made.stop(retire=True, timeout_s=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: Path) -> dict[Prompt, tuple[int, ...]]:
    plain = begin("plain", model, model / "plain.log")
    try:
        plain.wait_ready()
        return answers_of(plain, prompts_of(1))
    finally:
        stop(plain)


@pytest.fixture(scope="module", params=["recompute", "fail"])
def engines(request: pytest.FixtureRequest, shard: Shard, model: Path) -> Iterator[list[Replica]]:
    kinds = {
        "reset": {"reset_every_s": 0.15},
        "small": {"num_blocks": 70, "enable_prefix_caching": False, "async_scheduling": False},
    }
    made = [
        begin(name, model, model / f"{name}.log", policy=request.param, **options)
        for name, options in kinds.items()
    ]
    try:
        for one in made:
            one.wait_ready()
        yield made
    finally:
        for one in made:
            stop(one)


def test_bits_are_flipped(
    shard: Shard, engines: list[Replica], truth: dict[Prompt, tuple[int, ...]]
) -> None:
    arena = open_arena(shard._settings.directory)

    def flip(chance: random.Random) -> None:
        ready = arena.tables.slots_in(READY)
        for _ in range(10) if len(ready) else ():
            bytes_of = arena.slot_bytes(int(chance.choice(ready)))
            bytes_of[chance.randrange(len(bytes_of))] ^= 1 << chance.randrange(8)

    try:
        with beside(flip, every_s=0.01):
            tally = lived(engines, truth)
    finally:
        arena.close()
    assert tally.wrong == []
    assert tally.errors == []
    assert tally.hit_tokens > 0


def lived(engines: list[Replica], truth: dict[Prompt, tuple[int, ...]]) -> Tally:
    """Have engines live side by side."""
    tally = Tally()
    threads = [
        threading.Thread(
            target=live, args=(one, truth, NUM_ANSWERS), kwargs={"seed": seed, "tally": tally}
        )
        for seed, one in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        f"{tally.answers} answers, {tally.cancelled} cancelled, {tally.hit_tokens} hit tokens,"
        f" {len(tally.wrong)} wrong, {len(tally.errors)} ended in an error"
    )
    for one in (*tally.wrong[:5], *tally.errors[:5]):
        print(one)
    return tally
