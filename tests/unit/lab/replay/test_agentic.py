import json
from collections.abc import Sequence

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.lab.replay.reading import Session, lay_out, read_session


def session(
    name: str,
    *times: float,
    ids: Sequence[int] = (1, 2),
    model: str = "a",
    block_tokens: int = 64,
    is_local: bool = True,
) -> Session:
    requests = [
        {"t": one, "in": block_tokens * len(ids), "hash_ids": list(ids), "model": model}
        for one in times
    ]
    scope = "local" if is_local else "global"
    content = {"block_size": block_tokens, "hash_id_scope": scope, "requests": requests}
    return read_session(json.dumps(content).encode(), name)


def test_requests_of_subagents_are_made_at_their_times() -> None:
    content = b"""{"block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 1.0, "type": "n", "in": 64, "hash_ids": [1], "model": "large"},
        {"t": 2.5, "type": "subagent", "requests": [
            {"t": 0.0, "in": 64, "hash_ids": [7], "model": "small"},
            {"t": 10.0, "in": 64, "hash_ids": [8], "model": "small"}]},
        {"t": 9.0, "type": "s", "in": 64, "hash_ids": [2], "model": "large"}]}"""
    found = read_session(content, "one.json")
    assert [(one["time_s"], list(one["ids"]), one["space"]) for one in found.requests] == [
        (1.0, [1], ("one.json", "large")),
        (2.5, [7], ("one.json", "small")),
        (12.5, [8], ("one.json", "small")),
        (9.0, [2], ("one.json", "large")),
    ]
    assert found.seconds == 12.5
    assert lay_out([found], name="x").times.tolist() == [0.0, 1.5, 8.0, 11.5]


def test_sessions_share_no_block() -> None:
    trace = lay_out([session("a", 0), session("b", 5)], name="x")
    assert sorted(trace.ids.tolist()) == [0, 1, 2, 3]


def test_sessions_whose_ids_hold_for_all_share_blocks() -> None:
    both = [session("a", 0, is_local=False), session("b", 5, is_local=False)]
    assert lay_out(both, name="x").ids.tolist() == [0, 1, 0, 1]


def test_models_share_no_block() -> None:
    both = [session("a", 0, is_local=False), session("b", 5, is_local=False, model="b")]
    assert lay_out(both, name="x").ids.tolist() == [0, 1, 2, 3]


def test_a_session_starts_when_another_one_has_ended() -> None:
    sessions = [session(name, 0, 10) for name in "abc"]
    assert lay_out(sessions, name="x", concurrent=1).times.tolist() == [0, 10, 10, 20, 20, 30]
    assert lay_out(sessions, name="x", concurrent=2).times.tolist() == [0, 0, 10, 10, 10, 20]
    assert lay_out(sessions, name="x", concurrent=9).times.tolist() == [0, 0, 0, 10, 10, 10]


def test_the_seed_alone_decides_the_order_of_sessions() -> None:
    sessions = [session(str(at), 0, 1 + at, ids=range(1 + at)) for at in range(9)]

    def lengths(seed: int, *, backwards: bool = False) -> list[int]:
        given = sessions[::-1] if backwards else sessions
        return list(np.diff(lay_out(given, name="x", concurrent=1, seed=seed).starts))

    assert lengths(1) == lengths(1, backwards=True)
    assert lengths(1) != lengths(2)


def test_sessions_with_blocks_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="b has blocks of 16 tokens and a of 64; replay them"):
        lay_out([session("a", 0), session("b", 0, block_tokens=16)], name="x")
