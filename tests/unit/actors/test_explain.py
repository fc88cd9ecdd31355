"""What became of blocks, from what shards know."""

import numpy as np

from kvray.actors import explain
from kvray.actors.explain import (
    EVICTED,
    NEVER_STORED,
    PARTIAL,
    STORED,
    _explained,
    block_states,
    state_runs,
)
from kvray.actors.shard.actor_requests import Asked, Whereabouts
from kvray.store.block_history import AHEAD, CLEARED, HOST, NVME
from kvray.trace.request_note import RequestNote


def known(
    host: list[int], *, disk: list[int] | None = None, left: list[float] | None = None
) -> Whereabouts:
    count = len(host)
    return Whereabouts(
        host=np.array(host),
        either=np.array(host if disk is None else np.maximum(host, disk)),
        left_at=np.array(left or [0.0] * count),
        left_tier=np.full(count, HOST if disk is None else NVME),
        left_by=np.full(count, AHEAD if disk is None else CLEARED),
        since=1.0,
    )


def test_blocks_are_told_with_all_places_that_have_them_whole_and_parts_may_be_on_several_nodes():
    answers = {"a": known([1, 1, 0]), "b": known([0, 0, 0], disk=[0, 1, 1])}
    found = block_states(answers, 3, num_parts=1)
    assert [block.places for block in found] == [
        (("a", "host"),),
        (("a", "host"), ("b", "nvme")),
        (("b", "nvme"),),
    ]
    assert {block.state for block in found} == {STORED}
    both = {"a": known([1, 1]), "b": known([1, 0])}
    assert [block.state for block in block_states(both, 2, num_parts=2)] == [STORED, PARTIAL]


def test_of_a_block_that_is_nowhere_the_latest_departure_is_told():
    answers = {
        "a": known([0, 0], left=[10.0, 0.0]),
        "b": known([0, 0], disk=[0, 0], left=[20.0, 0]),
    }
    gone, never = block_states(answers, 2, num_parts=1)
    assert gone[0] == EVICTED
    assert gone[2:] == ("b", "nvme", "cleared", 20.0)
    assert never.state == NEVER_STORED


def test_of_an_earlier_moment_that_a_block_had_left_counts_though_it_is_back():
    answers = {"a": known([1], left=[10.0])}
    assert block_states(answers, 1, num_parts=1)[0].state == STORED
    (then,) = block_states(answers, 1, num_parts=1, past=True)
    assert (then.state, then.cause, then.places) == (EVICTED, "ahead", (("a", "host"),))


def test_blocks_that_left_at_different_moments_are_one_run():
    answers = {"a": known([0, 0, 0, 1], left=[10.0, 12.0, 0.0, 0.0])}
    runs = list(state_runs(block_states(answers, 4, num_parts=1)))
    assert [(start, len(run), run[0].state) for start, run in runs] == [
        (0, 2, EVICTED),
        (2, 1, NEVER_STORED),
        (3, 1, STORED),
    ]
    assert [block.at for block in runs[0][1]] == [10.0, 12.0]
    assert list(state_runs([])) == []


def test_a_prompt_that_had_no_keys_is_missed_for_its_engine_s_reason():
    note = RequestNote(1, 9.0, 100, 16, 0, 0, 6, "fingerprinting")
    asked = Asked(replica="r", rank=0, note=note, namespace=None)
    told, _ = _explained("kvray-shard-a", asked, 1.0)
    assert (told["missed_tokens"], told["reason"]) == (96, "fingerprinting")
    assert [(one["what"], one["stop"]) for one in told["ranges"]] == [
        ("miss", 96),
        ("computed", 100),
    ]


def test_a_shard_that_does_not_say_what_became_of_blocks_is_named(monkeypatch):
    note = RequestNote(1, 9.0, 33, 16, 0, 0, 2, "not_stored", keys=(bytes(32), bytes(32)))
    asked = Asked(replica="r", rank=0, note=note, namespace=None)
    answers = {"asked": ({"a": [asked]}, []), "whereabouts": ({"a": known([0, 0])}, ["b"])}
    monkeypatch.setattr(explain, "_ask", lambda method, *_: answers[method])
    found = explain.explain_requests(replica=None, request=None, last=1, timeout_s=1.0)
    assert (found["requests"][0]["reason"], found["silent"]) == (NEVER_STORED, ["b"])
