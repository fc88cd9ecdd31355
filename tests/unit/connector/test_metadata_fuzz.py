"""Metadata of any figures: a load that cannot be kept stops the engine, a save is left out.

It comes from the engine's own leader, so this is about versions that differ and defects.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.actors.shard.shard import Shard
from kvray.engine.meta import (
    ConnectorMeta,
    PageIds,
    RankLeases,
    Release,
    SavePlan,
)
from kvray.errors import KVRayError
from kvray.store import Lease
from tests.examples import examples
from tests.unit.connector.conftest import MakePair, arena_of
from tests.unit.connector.pair import NUM_BLOCKS, Pair, Request

PROMPT = list(range(100, 140))
NUMBERS = st.integers(-3, 80) | st.sampled_from([-(2**63), -1, 2**31, 2**63 - 1, 2**64])
IDS = st.lists(st.integers(-2, NUM_BLOCKS + 3), max_size=12)
PAGES = st.tuples(IDS.map(PageIds.of)) | st.tuples(st.binary(max_size=9).map(PageIds))


class Scene:
    """A worker that has stored PROMPT, and what it would be told to load it again."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        pair.serve(Request(1, PROMPT))
        pair.flush()
        self.number = 10

    def meta(self) -> ConnectorMeta:
        """Return the metadata of a pass that loads, of which the worker has not heard."""
        self.number += 1
        request = Request(self.number, PROMPT)
        assert self.pair.query(request) == 36
        meta = self.pair.plan(request)
        self.pair.worker.bind_connector_meta(None)
        self.pair.scheduler.request_finished(request, request.block_ids)
        return meta

    def run(self, meta: ConnectorMeta) -> None:
        worker = self.pair.worker
        worker.bind_connector_meta(meta)
        try:
            worker.start_load_kv(None)
            self.pair.end_pass()
        except Exception:
            worker._rank.failed.clear()  # an engine of its own for each metadata
            raise


@pytest.fixture
def scene(shard: Shard, make_pair: MakePair) -> Scene:
    return Scene(make_pair())


@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    fields=st.fixed_dictionaries(
        {}, optional={"leased_blocks": NUMBERS, "first": NUMBERS, "pages": PAGES}
    ),
    lease=st.none() | st.tuples(NUMBERS, NUMBERS),
    depth=NUMBERS,
    keys=st.binary(max_size=96),
    saved=PAGES,
    released=NUMBERS,
)
def test_metadata_of_any_figures_writes_to_no_page_that_it_does_not_name(
    scene: Scene,
    fields: dict[str, Any],
    lease: tuple[int, int] | None,
    depth: int,
    keys: bytes,
    saved: tuple[PageIds],
    released: int,
) -> None:
    meta = scene.meta()
    (load,) = meta.loads
    ids = load.leased.arena_ids
    if lease is not None:
        fields["leased"] = RankLeases(
            ids, (Lease(lease_id=lease[0], page=lease[1], num_slots=10, check=0),)
        )
    changed = load._replace(**fields)
    told = meta._replace(
        loads=(changed,),
        saves=(SavePlan(99, depth, keys, saved),),
        releases=(Release(0, ids[0], Lease(lease_id=released, page=5, num_slots=1, check=0)),),
    )
    before = scene.pair.pool.clone()
    with contextlib.suppress(KVRayError, ValueError, IndexError, OverflowError):
        scene.run(told)  # what it raises stops the engine
    arena_of(scene.pair).release(*load.leased.leases)
    packed = changed.pages[0].packed
    named = set(changed.pages[0].ids().tolist()) if len(packed) % 4 == 0 else set()
    written = (scene.pair.pool != before).any(dim=-1).any(dim=-1).any(dim=-1)
    assert set(written.nonzero().flatten().tolist()) <= named
    # What was promised rightly goes on to be served.
    scene.pair.worker.bind_connector_meta(None)
    assert scene.pair.serve(Request(scene.number + 10_000, PROMPT)) == 36
