"""A tier and its replay: what is there, and that the policies hear of every request in turn."""

import numpy as np
import pytest

from kvray.lab.replay import Trace
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES
from kvray.store import policy as policies
from kvray.store.policy import LRU, Use
from kvray.store.replay import NO_PARENT, NOWHERE, Replay, Tier
from tests.unit.lab.replay.excerpts import made, random_trace

each_policy = pytest.mark.parametrize("policy", POLICIES)


class Checked:
    """A replay whose tiers are looked at before each request."""

    def __init__(self, trace: Trace, policy: str, *, nvme_blocks: int, admission: str) -> None:
        self.trace = trace
        self.replay = Replay(trace, policy, 40, nvme_blocks, admission=admission)

    def run(self) -> None:
        """Make all requests; before each one, check, and foretell what it finds."""
        expected = [0, 0]
        for request in self.replay.run():
            self.check(self.replay.host, 40)
            self.check(self.replay.disk, len(self.replay.disk._blocks))
            self.check_copies()
            assert not request or expected == self.hits(request - 1)
            expected = self.foretell(request)
        assert expected == self.hits(request)

    def hits(self, request: int) -> list[int]:
        return [int(self.replay.host_hits[request]), int(self.replay.disk_hits[request])]

    def foretell(self, request: int) -> list[int]:
        """Return how many blocks of a request each tier has."""
        ids = self.trace.ids[self.trace.starts[request] : self.trace.starts[request + 1]].tolist()
        found = []
        for tier in (self.replay.host, self.replay.disk):
            there = set(tier._blocks.tolist())
            leading = 0
            while leading < len(ids) and ids[leading] in there:
                leading += 1
            found.append(leading)
            ids = ids[leading:]
        return found

    def check(self, tier: Tier, num_blocks: int) -> None:
        here = np.flatnonzero(tier.slots != NOWHERE)
        assert sorted(tier.slots[here].tolist() + tier._free) == list(range(num_blocks))
        assert (tier._blocks[tier.slots[here]] == here).all()
        assert (tier._blocks[tier._free] == NOWHERE).all()
        above = self.trace.parents[here]
        assert (tier.slots[above[above != NO_PARENT]] != NOWHERE).all(), "only prefixes are"

    def check_copies(self) -> None:
        host, disk = self.replay.host, self.replay.disk
        both = np.flatnonzero((host.slots != NOWHERE) & (disk.slots != NOWHERE))
        if isinstance(host.policy, LRU) and isinstance(disk.policy, LRU):
            above, below = host.slots[both], disk.slots[both]
            assert (disk.policy._last[below] == host.policy._last[above]).all()


@each_policy
@pytest.mark.parametrize(("disk", "admission"), [(0, "all"), *((60, one) for one in ADMISSIONS)])
def test_tiers_have_what_they_say(policy, disk, admission):
    checked = Checked(
        random_trace(1, num_requests=500), policy, nvme_blocks=disk, admission=admission
    )
    checked.run()
    assert not disk or checked.replay.num_written > 90, "it was full once"
    assert bool(disk) == checked.replay.disk_hits.any()


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
