"""Several ranks: metadata that was really pickled, bytes of their own, owners of requests.

Engines of one model with different numbers of ranks answer from what the others have computed.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvray.store.arena.layout import READY
from tests.trtllm.conftest import PROMPT, MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.memory import BLOCK, FLAT, HEADS, MLA, GroupShape, with_dtype
from tests.trtllm.version import WITH_GROUPS, on
from tests.waiting import wait_for

LONG = list(range(200))
CONSTANT_BYTES = 700
"""The most bytes of metadata beside the blocks of a load and a save."""


@pytest.mark.parametrize("shape", [FLAT, MLA], ids=lambda shape: shape.name)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_loads_its_own_bytes(make_warm, shape, num_ranks):
    warm = make_warm(shape=shape, num_ranks=num_ranks, chunk=12)
    assert warm.serve(PROMPT, max_new=9).num_hit == 36


def test_a_latent_cache_is_stored_once_for_all_ranks(make_engine):
    cold = make_engine(shape=MLA, num_ranks=2)
    cold.serve(PROMPT)
    cold.close()
    assert [one._rank.shared.figures.totals["stored_blocks"] for one in cold.workers] == [10, 0]
    for num_ranks in (1, 4):
        warm = make_engine(shape=MLA, num_ranks=num_ranks)
        assert (warm.serve(PROMPT).num_hit, resliced(warm)) == (HIT, 0)


def test_a_prefix_counts_only_if_every_rank_has_it(make_engine, monkeypatch):
    cold = make_engine(num_ranks=2)
    monkeypatch.setattr(cold.workers[1], "wait_for_save", lambda _stream: None)
    cold.serve(PROMPT)
    cold.close()
    assert make_engine(num_ranks=2).serve(PROMPT).num_hit == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_metadata_has_8_bytes_a_block_and_rank_and_32_for_a_key_that_is_saved(
    make_engine, num_ranks
):
    def most_of(prompt: list[int], num_hit: int) -> int:
        engine = make_engine(num_ranks=num_ranks, num_pages=256)
        assert engine.serve(prompt).num_hit == num_hit
        engine.close()
        return max(engine.ranks.sent)

    blocks = len(LONG) // BLOCK
    assert most_of(LONG, 0) <= CONSTANT_BYTES + (32 + 8 * num_ranks) * blocks
    loaded = most_of(LONG, len(LONG) - 4)
    assert loaded <= CONSTANT_BYTES + 8 * blocks * num_ranks
    # Without the constant: what a longer prompt adds.
    smaller = most_of(LONG[: len(LONG) // 2], len(LONG) // 2 - 4)
    assert (loaded - smaller) / (blocks / 2) <= 8 * num_ranks


@on(*WITH_GROUPS)
def test_owners_under_attention_dp_share_what_each_has_computed(make_engine):
    owners = [make_engine(owner=0), make_engine(owner=1)]
    for owner in owners:
        owner.add_dummy()
    owners[0].serve(PROMPT, max_new=9)
    owners[0].close()
    assert owners[1].serve(PROMPT, max_new=9).num_hit == 36


HIT = 36
PAIRS = [
    *((1, 2, "auto"), (1, 4, "always"), (2, 1, "never")),
    *((2, 4, "auto"), (4, 1, "always"), (4, 2, "never")),
]
"""How many ranks store, how many load, and whether these verify checksums."""
typed = on("v1_2", "v1_3rc", "main_line")
"""Versions whose layout says of which type its elements are, or that hand over a tensor."""


def resliced(engine: Engine) -> int:
    return int(engine.totals["resliced_tokens"])


@pytest.fixture
def sized(make_engine: MakeEngine) -> MakeEngine:
    """Make engines of so many ranks, which share out heads."""
    return lambda num_ranks, **options: make_engine(shape=HEADS, num_ranks=num_ranks, **options)


@typed
@pytest.mark.parametrize(("stored_by", "read_by", "verify"), PAIRS)
def test_what_one_size_has_stored_another_loads(
    on_device, sized, stored, monkeypatch, stored_by, read_by, verify
):
    monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", verify)
    stored(shape=HEADS, num_ranks=stored_by, chunk=12)
    warm = sized(read_by, chunk=12)
    assert warm.serve(PROMPT, max_new=9).num_hit == HIT
    assert resliced(warm) == HIT


@typed
def test_what_was_loaded_is_stored_in_the_engine_s_own_way(sized, stored):
    stored(shape=HEADS)
    middle, longer = sized(2), [*PROMPT, *range(20)]
    assert middle.serve(longer).num_hit == 40
    middle.close()
    last = sized(2)
    assert last.serve(longer).num_hit == 56
    assert resliced(last) == 0


@typed
def test_the_longest_prefix_counts_whoever_has_stored_it(sized):
    narrow, wide = sized(4), sized(1)
    narrow.serve(PROMPT[:17])
    wide.serve(PROMPT[:29])
    narrow.close()
    reader = sized(4)
    assert reader.serve(PROMPT).num_hit == 28
    own = sized(4)
    assert own.serve(PROMPT).num_hit == HIT
    assert (resliced(reader), resliced(own)) == (28, 0)


@typed
def test_what_the_engine_has_itself_is_not_loaded(sized, stored):
    stored(shape=HEADS, num_ranks=2)
    engine = sized(4)
    engine.serve(PROMPT[:9])
    assert engine.serve(PROMPT).num_hit == HIT - 8


@typed
def test_salts_keep_requests_of_all_sizes_apart(sized, stored, version):
    mine, other = (7, 8) if version.salt_field == "cache_salt_id" else ("mine", "other")
    stored(shape=HEADS, fields={version.salt_field: mine})
    warm = sized(2)
    hits = [warm.serve(PROMPT, **{version.salt_field: salt}).num_hit for salt in (None, other)]
    assert hits == [0, 0]
    assert sized(2).serve(PROMPT, **{version.salt_field: mine}).num_hit == HIT


@typed
def test_a_corrupt_block_of_another_size_shortens_the_hit(sized):
    cold, warm = sized(2), sized(1)
    cold.serve(PROMPT)
    tables = cold.arena.tables
    wait_for(lambda: (tables.slot_state == READY).sum() == 20, "the saves")
    slot, *_ = ((tables.slot_state == READY) & (tables.slot_depth == 5)).nonzero()[0]
    cold.arena.slot_bytes(int(slot))[3] ^= 1
    assert warm.serve(PROMPT).num_hit == 20


INDEXED = GroupShape(layers=(0, 1), own=("key", "value", "index_key"))
UNCUT: dict[str, dict[str, Any]] = {
    "one head": {"shape": replace(HEADS, name="one head", num_heads=1)},
    "scaled": {"shape": replace(with_dtype(torch.float8_e4m3fn), name="scaled", num_heads=8)},
    "tokens first": {"shape": HEADS, "attn_backend": "FLASHINFER"},
    "windowed": {
        "shape": replace(HEADS, name="windowed", groups=(GroupShape(layers=(0, 1), window=16),))
    },
    "with an index": {"shape": replace(HEADS, name="indexed", groups=(INDEXED,))},
}


@pytest.mark.parametrize("what", UNCUT)
def test_what_cannot_be_cut_by_heads_is_not_shared(make_engine, version, what):
    if what in ("windowed", "with an index") and not version.has_groups:
        pytest.skip("this version has one pool, without windows and indices")
    make_engine(num_ranks=2, **UNCUT[what]).serve(PROMPT)
    for num_ranks in (1, 4):
        assert make_engine(num_ranks=num_ranks, **UNCUT[what]).serve(PROMPT).num_hit == 0


@typed
@pytest.mark.parametrize(
    ("num_heads", "hits"), [(None, [HIT, HIT]), (6, [HIT, 0]), ([8, 8, 4], [0, 0])]
)
def test_the_checkpoint_s_heads_decide(sized, stored, tmp_path, num_heads, hits):
    """Of 6 heads 4 ranks cannot have as many each, and layers that differ are not cut."""
    config = {"num_hidden_layers": 3, "num_key_value_heads": num_heads}
    written = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(written))
    stored(shape=HEADS, model=str(tmp_path))
    others = [sized(num_ranks, model=str(tmp_path)) for num_ranks in (2, 4)]
    assert [engine.serve(PROMPT).num_hit for engine in others] == hits


@on("feature_branch")
def test_a_cache_without_a_dtype_is_not_cut(sized, stored):
    stored(shape=HEADS)
    assert [sized(num_ranks).serve(PROMPT).num_hit for num_ranks in (1, 2)] == [HIT, 0]
