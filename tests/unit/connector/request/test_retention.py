"""What an engine says of how long blocks are to be kept arrives beside them in the arena."""

import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta, SavePlan
from kvray.engine.request.state import Priorities, read_priorities
from kvray.identity.block import namespace_id
from kvray.identity.keys import chain_keys, request_seed
from kvray.store.arena import key_index
from tests.unit.connector.conftest import MakePair
from tests.unit.connector.pair import BLOCK, Pair, Request

PROMPT = list(range(100, 132))


def report_of(request: Request, priorities: Any, *, matched: int = 0) -> RequestData:
    return RequestData(
        request.request_id,
        list(request.tokens),
        list(request.block_ids),
        0,
        len(request.tokens) - matched,
        priorities=priorities,
    )


def serve(pair: Pair, request: Request, priorities: Any) -> None:
    """Serve a request whose blocks are to be kept so long."""
    matched = pair.query(request)
    report = report_of(request, priorities, matched=matched)
    run(pair, SchedulerOutput(new_requests=[report]))
    pair.compute(request)
    pair.finish(request)
    pair.flush()


def run(pair: Pair, output: SchedulerOutput) -> None:
    pair.worker.bind_connector_meta(pair.scheduler.build_connector_meta(output))
    pair.worker.start_load_kv(None)


def kept(pair: Pair, tokens: list[int]) -> tuple[list[int], set[int]]:
    """Return priorities and namespaces of the blocks of a prompt in the arena, in its order."""
    engine = pair.worker._rank.shared
    seed = request_seed(engine.pool.namespace_digest, salt=None, lora=None)
    keys = chain_keys(tokens, tokens_per_block=BLOCK, seed=seed)
    arena = engine.link.arena
    assert arena is not None
    found = key_index.find(arena.tables, key_index.pack_keys(keys), 0)
    found = found[found >= 0]
    tables = arena.tables
    return tables.slot_priority[found].tolist(), set(tables.slot_namespace[found].tolist())


def test_every_block_has_the_priority_that_the_engine_gave_it(
    shard: Shard, make_pair: MakePair
) -> None:
    pair, wanted = make_pair(), [100, 90, 80, 35, 0, 50, 50, 50]
    serve(pair, Request(1, PROMPT), wanted)
    namespace = namespace_id(pair.worker._rank.shared.pool.namespace_digest)
    assert kept(pair, PROMPT) == (wanted, {namespace})
    assert namespace != 0


def test_without_priorities_blocks_have_the_default(shard: Shard, make_pair: MakePair) -> None:
    pair = make_pair()
    serve(pair, Request(1, PROMPT), None)
    assert kept(pair, PROMPT)[0] == [35] * 8


def test_status_shows_the_namespace_by_the_name_of_the_replicas(
    shard: Shard, make_pair: MakePair
) -> None:
    pair = make_pair()
    serve(pair, Request(1, PROMPT), None)
    status = shard.status()
    (mine,) = (one for one in status["arena"]["namespaces"] if one["namespace"])
    assert mine["namespace"] in status["namespaces"]
    assert mine["blocks"] == 8


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([-5, 10**6, 99, 1, 2, 3, 4, 5], [0, 100, 99, 1, 2, 3, 4, 5]),
        ([90, 91], [90, 91, *[35] * 6]),
        ([90] * 20, [90] * 8),
        ([], [35] * 8),
        ([None] * 8, [35] * 8),
        (["high"] * 8, [35] * 8),
        ([10**30] * 8, [35] * 8),
        ([float("nan")] * 8, [35] * 8),
        ([[1, 2]] * 8, [35] * 8),
        ("1" * 8, [35] * 8),
        (7, [35] * 8),
    ],
)
def test_nonsense_is_clamped_or_passed_over(
    shard: Shard, make_pair: MakePair, asked: Any, wanted: list[int]
) -> None:
    pair = make_pair()
    serve(pair, Request(1, PROMPT), asked)
    assert kept(pair, PROMPT)[0] == wanted
    assert not pair.totals["errors"]


def test_blocks_that_are_here_are_kept_longer_when_a_request_asks_for_it(
    shard: Shard, make_pair: MakePair
) -> None:
    pair = make_pair()
    serve(pair, Request(1, PROMPT), None)
    serve(pair, Request(2, PROMPT), [90, 90, 10, 10, 35, 35, 35, 35])
    assert pair.totals["hit_tokens"] == len(PROMPT) - BLOCK
    assert kept(pair, PROMPT)[0] == [90, 90, *[35] * 6]
    serve(pair, Request(3, PROMPT), None)
    assert kept(pair, PROMPT)[0] == [90, 90, *[35] * 6]
    assert pair.totals["stored_blocks"] == 8


def test_priorities_of_later_reports_belong_to_their_new_blocks(
    shard: Shard, make_pair: MakePair
) -> None:
    pair = make_pair()
    request = Request(1, PROMPT)
    pair.query(request)
    run(pair, SchedulerOutput(new_requests=[report_of(request, None)]))
    pair.compute(request)
    more = list(range(BLOCK + 1))
    request.tokens = [*PROMPT, *more]
    request.block_ids += [60, 61]
    late = RequestData(1, more, [60, 61], 8 * BLOCK, BLOCK, priorities=[77, 78])
    run(pair, SchedulerOutput(cached_requests=[late]))
    pair.compute(request)
    pair.finish(request)
    pair.flush()
    assert kept(pair, request.tokens)[0] == [*[35] * 8, 77]


def test_metadata_travels_with_priorities_and_without() -> None:
    plain = ConnectorMeta(namespace=b"n", replica="r")
    with_some = plain._replace(saves=(SavePlan(1, 0, b"", (), priorities=b"\x5a"),))
    for meta in (plain, with_some):
        assert pickle.loads(pickle.dumps(meta)) == meta  # noqa: S301 (made right here)


def test_reports_without_the_field_say_nothing() -> None:
    assert read_priorities(SimpleNamespace()) == b""
    assert read_priorities(MagicMock()) == b""
    assert read_priorities(SimpleNamespace(priorities=(1, np.int32(2)))) == b"\x01\x02"


def test_what_has_the_default_throughout_needs_no_bytes() -> None:
    priorities = Priorities()
    assert priorities.of(0, 5) == b""
    priorities.extend(bytes([35, 35]), at=0, count=2)
    priorities.extend(bytes([90]), at=4, count=1)
    assert priorities.of(0, 4) == b""
    assert priorities.of(3, 7) == bytes([35, 90, 35, 35])
    assert not priorities.are_raised(4)
    assert priorities.are_raised(5)
