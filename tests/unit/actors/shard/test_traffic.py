"""The curve of a shard: worked out a little at a time, of what its engines report."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.actors.shard import traffic
from kvray.actors.shard.traffic import Traffic
from kvray.actors.staging.replicas import Origin
from kvray.errors import ConfigError
from tests.unit.actors.small_shard import NAMESPACE, settings_for
from tests.unit.store.sizing.prompts import sampled

MINE = replace(NAMESPACE, part_bytes=1000)
ORIGIN = Origin(replica="r", rank=0, namespace=MINE)
NAME = MINE.digest().hex()[:8]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(traffic, "_CURVE_S", 0.0)
    return Traffic(settings_for(Path("/dev/shm/kvray-test-none")))


def report(made: Traffic, seed: int = 0, count: int = 60) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**64, (count, 10), dtype="u8")
    limit = made.note(ORIGIN, 1000, b"")
    made.note(ORIGIN, 1000, sampled(list(numbers), limit=limit).pack())


def until_drawn(made: Traffic) -> dict[str, Any]:
    before = made._curve
    for _ in range(20_000):
        made.step(made._stepped_at + 1.0)
        if made._curve is not before:
            return made.status()
    raise AssertionError("no curve")


def test_without_prompts_there_is_no_curve_and_nothing_is_done(made):
    for second in range(100):
        made.step(time.monotonic() + second)
    assert made.status() == {"namespaces": {}, "age_s": None, "lost_prompts": 0}


def test_prompts_that_come_again_are_worth_memory(made):
    report(made)
    report(made)
    found = until_drawn(made)
    (curve,) = found["namespaces"].values()
    assert list(found["namespaces"]) == [NAME]
    # 600 blocks of 1,000 bytes, in 1/16 of the memory and in all of it.
    assert curve["host"][-1] > 0.4 > curve["host"][0]
    assert len(curve["host"]) == len(found["sizes"])
    assert found["host_bytes"] in found["sizes"]
    assert found["sampled_prompts"] == 120


def test_a_step_takes_no_more_than_its_share_of_a_core(made):
    report(made)
    now, began_s = time.monotonic(), time.thread_time()
    for at in range(1000):
        made.step(now + at / 20)
    # In 50 s; one step more than it has earned may be under way.
    assert time.thread_time() - began_s < 50 * 0.01


def test_a_curve_is_drawn_again_when_there_are_new_prompts_only(made):
    report(made)
    first = until_drawn(made)
    made.step(time.monotonic() + 1e6)
    assert made._steps is None
    report(made, seed=1)
    assert until_drawn(made)["sampled_prompts"] > first["sampled_prompts"]


def test_bytes_that_are_no_sample_are_refused(made):
    with pytest.raises(ConfigError):
        made.note(ORIGIN, 1000, b"nothing of the kind")


def test_a_shard_that_starts_again_takes_a_sample_that_is_dense_enough_and_no_other(made):
    numbers = np.random.default_rng(0).integers(0, 2**64, (60, 10), dtype="u8")
    before_restart = sampled(list(numbers), limit=2**60)
    limit = made.note(ORIGIN, 1000, before_restart.pack())
    assert made.status()["lost_prompts"] == len(before_restart.ages) > 0
    made.note(ORIGIN, 1000, sampled(list(numbers), limit=limit).pack())
    assert made.plan().window.trace.num_refs == 600
