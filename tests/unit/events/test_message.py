"""The messages of KV events."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.errors import TransferError
from kvray.events.message import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    pack,
    pack_sequence,
    unpack,
    unpack_sequence,
)

HASHES = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4).map(tuple)
EVENTS = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=HASHES,
        parent_block_hash=st.none() | st.integers(0, 2**64 - 1),
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
        block_size=st.integers(1, 128),
        lora_id=st.none() | st.integers(0, 9),
        medium=st.sampled_from([None, "GPU", "CPU", "STORAGE"]),
        lora_name=st.none() | st.text(max_size=4),
        group_idx=st.none() | st.integers(0, 3),
    ),
    st.builds(BlockRemoved, block_hashes=HASHES, medium=st.sampled_from([None, "CPU"])),
    st.just(AllBlocksCleared()),
)


@given(st.builds(Batch, at=st.floats(0, 1e12), events=st.lists(EVENTS).map(tuple)))
def test_a_batch_comes_back_as_it_was(batch):
    assert unpack(pack(batch)) == batch


def test_a_batch_has_the_form_that_other_publishers_use():
    stored = BlockStored(block_hashes=[2**64 - 1], token_ids=[5, 6], block_size=2, medium="CPU")

    at, events, dp_rank = msgpack.unpackb(pack(Batch(at=1.5, events=[stored], dp_rank=0)))

    assert (at, dp_rank) == (1.5, 0)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1],
            "parent_block_hash": None,
            "token_ids": [5, 6],
            "block_size": 2,
            "medium": "CPU",
        }
    ]


def test_events_as_lists_and_hashes_as_bytes_are_read_and_what_is_new_is_passed_over():
    later = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": []}
    payload = msgpack.packb(
        [
            2.0,
            [
                ["BlockStored", [b"\x01"], None, [7, 8], 2, None, "GPU"],
                {"type": "BlockPinned", "block_hashes": [1]},
                {**later, "block_size": 16, "kv_cache_spec_kind": "mla"},
            ],
        ]
    )

    first, second = unpack(payload).events

    assert first == BlockStored(
        block_hashes=(b"\x01",), token_ids=(7, 8), block_size=2, medium="GPU"
    )
    assert second == BlockStored(
        block_hashes=(1,), token_ids=(), block_size=16, kv_cache_spec_kind="mla"
    )


def test_a_batch_may_be_a_map_as_vllm_has_it_now():
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": None}
    batch = {"ts": 2.0, "events": [event]}
    assert unpack(msgpack.packb(batch)) == Batch(at=2.0, events=(BlockRemoved(block_hashes=(1,)),))
    ranked = unpack(msgpack.packb({**batch, "data_parallel_rank": 3}))
    assert ranked.dp_rank == 3


STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}


@pytest.mark.parametrize(
    "payload",
    [
        msgpack.packb([1.0, [{**STORED, "token_ids": [1], "block_size": 2**31}]]),
        msgpack.packb([1.0, [{**STORED, "token_ids": [2**32], "block_size": 1}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [bytes(65)]}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2**40}]]),
        msgpack.packb([1.0, [], 2**40]),
        msgpack.packb([1.0, [], "9" * 4000]),
        msgpack.packb([1.0, [{"type": {}}]]),
        msgpack.packb({"events": []}),
        msgpack.packb([1.0, [[]] * 200_000]),  # 200 kB that would be 11 MB
        b"\x93\x01\xdd\xff\xff\xff\xff",  # a list of 4 billion that ends there
        b"\x91" * 100_000,
        b"\x93\x01\x90\xc7\x08\x01" + bytes(8),
        b"",
        b"\xc1",
        msgpack.packb([1.0]),
        msgpack.packb([1.0, [{"type": "BlockStored"}]]),
        msgpack.packb([1.0, [{"block_hashes": []}]]),
        msgpack.packb([1.0, [3]]),
        msgpack.packb(["x", []]),
    ],
)
def test_other_bytes_are_refused_in_a_sentence(payload):
    with pytest.raises(TransferError, match="not in the format"):
        unpack(payload)


@given(st.integers(-1, 2**63 - 1))
def test_a_sequence_number_has_a_frame(number):
    assert unpack_sequence(pack_sequence(number)) == number


def test_a_sequence_frame_has_eight_bytes():
    with pytest.raises(TransferError, match="8 bytes"):
        unpack_sequence(b"1")
