"""The index of a lookup beside the tiers of a replay."""

import numpy as np
import pytest

from kvray.lab.replay.simulator import Announced
from kvray.store.replay import Replay, Trace
from kvray.store.replay.tier import NOWHERE
from tests.unit.lab.replay.excerpts import CONVERSATION, excerpt


def announce_all(replay: Replay, announced: Announced) -> None:
    for request in replay.run():
        announced.before(request)
    announced.at_end()


def made(*sizes: int) -> tuple[Trace, Replay, Announced]:
    trace = excerpt(CONVERSATION)
    replay = Replay(trace, "lru", *sizes)
    return trace, replay, Announced(replay, trace)


def test_the_index_has_at_the_end_what_the_tiers_have() -> None:
    _, replay, announced = made(1000, 500)
    announce_all(replay, announced)
    here = np.stack([replay.host.slots, replay.disk.slots]) != NOWHERE
    assert (announced._known == here).all()
    assert here.sum(axis=1).tolist() == [1000, 500]


def test_a_tier_that_disagrees_with_the_index_is_found_out() -> None:
    _, replay, announced = made(1000)
    announced._index.add("0", announced._keys[:1].tobytes(), [0])
    with pytest.raises(AssertionError):
        announce_all(replay, announced)
