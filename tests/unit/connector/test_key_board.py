"""Keys on the board are those that were written, or none."""

import pickle
import secrets
from collections.abc import Iterator

import pytest

from kvray.actors.shard.shard import Shard
from kvray.engine.key_board import KeyBoard, open_board, read_keys
from kvray.engine.meta import ConnectorMeta, KeyRun, LoadPlan, PageIds, RankLeases, SavePlan
from kvray.identity.block import BlockKey
from kvray.store import Arena, Lease
from tests.unit.connector.conftest import MakePair, arena_of

BLOCK_BYTES = 64


@pytest.fixture
def arena(shard: Shard, make_pair: MakePair) -> Arena:
    return arena_of(make_pair())


@pytest.fixture
def board(arena: Arena) -> Iterator[KeyBoard]:
    made = open_board(arena, block_bytes=BLOCK_BYTES)
    assert made is not None
    yield made
    made.close()
    assert (arena.tables.slot_state == 0).all()


def keys_of(count: int) -> list[BlockKey]:
    return [BlockKey(secrets.token_bytes(32)) for _ in range(count)]


def test_keys_come_back_round_and_round_across_slots(arena: Arena, board: KeyBoard) -> None:
    capacity = board.room
    assert len(board.place.slots) > 1
    for count in (1, 5, capacity - 3, capacity, 100, capacity // 2, capacity // 2 + 1):
        board.begin_pass()
        keys = keys_of(count)
        run = board.publish(keys)
        assert board.room == capacity - count
        assert read_keys(arena, board.place, run) == keys


def test_several_runs_of_a_pass_stand_beside_each_other(arena: Arena, board: KeyBoard) -> None:
    board.publish(keys_of(board.room // 2))
    board.begin_pass()
    all_keys = [keys_of(board.room // 4) for _ in range(4)]
    runs = [board.publish(keys) for keys in all_keys]
    assert [read_keys(arena, board.place, run) for run in runs] == all_keys


def test_keys_that_were_written_over_are_not_taken_for_others(
    arena: Arena, board: KeyBoard
) -> None:
    run = board.publish(keys_of(10))
    board.begin_pass()
    board.publish(keys_of(board.room))
    assert read_keys(arena, board.place, run) is None


def test_the_board_is_never_found_nor_counted_as_a_block(arena: Arena, board: KeyBoard) -> None:
    board.publish(keys_of(3))
    assert arena.stats()["blocks"] == 0


def test_metadata_costs_four_bytes_a_block_and_a_small_constant() -> None:
    def meta(num_blocks: int) -> bytes:
        lease = Lease(lease_id=2**40, page=7, num_slots=num_blocks, check=2**63)
        pages = (PageIds.of(list(range(num_blocks))),)
        load = LoadPlan(3, RankLeases(("a" * 32,), (lease,)), num_blocks, 0, pages, 1)
        save = SavePlan(3, 0, KeyRun(0, num_blocks, 2**63), pages)
        made = ConnectorMeta(namespace=b"n" * 32, loads=(load,), saves=(save,))
        assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 (made right here)
        return pickle.dumps(made)

    assert len(meta(4096)) - len(meta(0)) < 2 * 4 * 4096 + 32
    assert len(meta(0)) < 500


def test_pages_are_packed_as_they_are() -> None:
    assert PageIds.of([5, -1, 2**31 - 1]).ids().tolist() == [5, -1, 2**31 - 1]


def test_passes_that_are_planned_ahead_have_a_share_of_the_board_each(arena: Arena) -> None:
    board = open_board(arena, block_bytes=BLOCK_BYTES, num_passes=2)
    assert board is not None
    passes = []
    for _ in range(7):
        board.begin_pass()
        keys = keys_of(board.room)
        passes.append((keys, board.publish(keys)))
        assert board.room == 0
        for written, run in passes[-2:]:
            assert read_keys(arena, board.place, run) == written
    board.close()
