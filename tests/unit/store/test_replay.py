"""A tier and its replay: what is there, and that the policies hear of every request in turn."""

import itertools

import numpy as np
import pytest

from kvray.lab.replay import Trace
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES
from kvray.store import policy as policies
from kvray.store.policy import LRU, Use
from kvray.store.replay import NO_PARENT, NOWHERE, Replay, Tier
from tests.unit.lab.replay.excerpts import made, random_trace


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("disk", "admission"), [(0, "all"), *((60, one) for one in ADMISSIONS)])
def test_tiers_have_what_they_say(policy, disk, admission):
    """Before each request they are looked at, and it is foretold what the request finds."""
    trace = random_trace(1, num_requests=500)
    replay = Replay(trace, policy, 40, disk, admission=admission)
    expected: list[list[int]] = []
    for request in replay.run():
        check_tier(replay.host, trace, num_blocks=40)
        check_tier(replay.disk, trace, num_blocks=len(replay.disk._blocks))
        check_copies(replay.host, replay.disk)
        ids = trace.ids[trace.starts[request] : trace.starts[request + 1]].tolist()
        expected.append([])
        for tier in (replay.host, replay.disk):
            there = set(tier._blocks.tolist())
            leading = sum(1 for _ in itertools.takewhile(there.__contains__, ids))
            expected[-1].append(leading)
            ids = ids[leading:]
    assert np.stack((replay.host_hits, replay.disk_hits), axis=1).tolist() == expected
    assert not disk or replay.num_written > 90, "it was full once"
    assert bool(disk) == replay.disk_hits.any()


def check_tier(tier: Tier, trace: Trace, *, num_blocks: int) -> None:
    here = np.flatnonzero(tier.slots != NOWHERE)
    assert sorted(tier.slots[here].tolist() + tier._free) == list(range(num_blocks))
    assert (tier._blocks[tier.slots[here]] == here).all()
    assert (tier._blocks[tier._free] == NOWHERE).all()
    above = trace.parents[here]
    assert (tier.slots[above[above != NO_PARENT]] != NOWHERE).all(), "only prefixes are"


def check_copies(host: Tier, disk: Tier) -> None:
    both = np.flatnonzero((host.slots != NOWHERE) & (disk.slots != NOWHERE))
    if isinstance(host.policy, LRU) and isinstance(disk.policy, LRU):
        above, below = host.slots[both], disk.slots[both]
        assert (disk.policy._last[below] == host.policy._last[above]).all()


def test_the_policy_is_told_of_every_request_in_turn(monkeypatch):
    told: list[tuple[float, int, int]] = []

    class Listening(LRU):
        def used(self, use: Use) -> None:
            told.append((use.now, use.depth, len(use.slots)))
            super().used(use)

        def stored(self, use: Use) -> None:
            self.used(use)

    monkeypatch.setitem(policies.POLICIES, "listening", Listening)
    trace = random_trace(3, num_requests=300)
    replay = Replay(trace, "listening", 40)
    list(replay.run())
    lengths = np.diff(trace.starts)
    expected = []
    for request, hits in enumerate(replay.host_hits.tolist()):
        now = trace.times[request]
        expected += [(now, 0, hits)] if hits else []
        missing = int(lengths[request]) - hits
        expected += [(now, hits, missing)] if missing else []
    assert told == expected


def test_a_prompt_longer_than_the_tier_keeps_its_head():
    replay = Replay(made(*((at, range(100)) for at in range(4))), "lru", 30)
    list(replay.run())
    assert replay.host_hits.tolist() == [0, 30, 30, 30]
