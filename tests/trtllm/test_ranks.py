"""Several ranks: metadata that was really pickled, bytes of their own, owners of requests."""

import pickle

import pytest

from tests.trtllm.conftest import MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.shapes import FLAT, MLA, Shape
from tests.trtllm.version import WITH_GROUPS, on

PROMPT = list(range(100, 140))
LONG = list(range(200))
CONSTANT_BYTES = 700
"""The most bytes of metadata beside the blocks of a load and a save."""


@pytest.mark.parametrize("shape", [FLAT, MLA], ids=lambda shape: shape.name)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_loads_its_own_bytes(
    make_engine: MakeEngine, shape: Shape, num_ranks: int
) -> None:
    cold = make_engine(shape=shape, num_ranks=num_ranks, chunk=12)
    cold.serve(PROMPT, max_new=9)
    cold.close()
    warm = make_engine(shape=shape, num_ranks=num_ranks, chunk=12)
    assert warm.serve(PROMPT, max_new=9).num_hit == 36


def test_a_latent_cache_is_stored_once_for_all_ranks(make_engine: MakeEngine) -> None:
    cold = make_engine(shape=MLA, num_ranks=2)
    cold.serve(PROMPT)
    cold.close()
    assert [one._rank.shared.figures.totals["stored_blocks"] for one in cold.workers] == [10, 0]


def test_a_prefix_counts_only_if_every_rank_has_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = make_engine(num_ranks=2)
    monkeypatch.setattr(cold.workers[1], "wait_for_save", lambda _stream: None)
    cold.serve(PROMPT)
    cold.close()
    assert make_engine(num_ranks=2).serve(PROMPT).num_hit == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_metadata_has_8_bytes_a_block_and_rank_and_32_for_a_key_that_is_saved(
    make_engine: MakeEngine, num_ranks: int
) -> None:
    sizes = []
    for _ in range(2):
        engine = make_engine(num_ranks=num_ranks, num_pages=256)
        engine.serve(LONG)
        sizes.append(max(size for size, _ in engine.manager.sent))
        engine.close()
    blocks = len(LONG) // 4
    assert engine.totals["loaded_blocks"] == blocks - 1
    saved, loaded = sizes
    assert saved <= CONSTANT_BYTES + (32 + 8 * num_ranks) * blocks
    assert loaded <= CONSTANT_BYTES + 8 * blocks * num_ranks
    # Without the constant: what a longer prompt adds.
    half = make_engine(num_ranks=num_ranks, num_pages=256)
    half.serve(LONG[: len(LONG) // 2])
    smaller = max(size for size, _ in half.manager.sent)
    assert (loaded - smaller) / (blocks / 2) <= 8 * num_ranks


@on(*WITH_GROUPS)
def test_owners_under_attention_dp_share_what_each_has_computed(make_engine: MakeEngine) -> None:
    owners = [make_engine(owner=0), make_engine(owner=1)]
    for owner in owners:
        owner.add_dummy()
    owners[0].serve(PROMPT, max_new=9)
    owners[0].close()
    assert owners[1].serve(PROMPT, max_new=9).num_hit == 36


def test_metadata_survives_pickling_as_it_is(make_engine: MakeEngine) -> None:
    engine: Engine = make_engine()
    engine.serve(PROMPT)
    for _, metadata in engine.manager.sent:
        assert pickle.loads(pickle.dumps(metadata)) == metadata  # noqa: S301
