"""The key board: slots of the arena by which ranks on one node get the keys of saved blocks.

A key has 32 bytes and every rank needs those of all blocks that it saves. The leader writes them
into slots of the arena that it has reserved, round and round, and the metadata says where. Nobody
else ever finds these slots, because they are never committed. When the leader ends or dies they
come back like every other reserved slot.

Keys for which the board has no room travel with the metadata, 32 bytes a block. So do all keys
where ranks are on several nodes. Only a pass that computes many tokens has so many keys, and beside
its work their sending is nothing. After the pass the request may have ended.

A rank never takes wrong keys. It reads them when a pass begins. An engine plans at most so many
passes ahead of the one that every rank has answered for, and each of them gets its share of the
board. Should that ever fail, the checksum beside the place differs, and the blocks are not saved.
"""

import secrets

import numpy as np
import xxhash

from kvray.engine.meta import Board, KeyRun
from kvray.identity.block import KEY_BYTES, BlockKey, split_keys
from kvray.store import Arena, Reservation
from kvray.store.arena.tables import Array

_BOARD_BYTES = 16 * 2**10
"""Smallest board; one slot is mostly more."""


class KeyBoard:
    """The leader's board in one arena; used by the engine's executor thread."""

    def __init__(
        self, arena: Arena, reservation: Reservation, slot_bytes: int, *, num_passes: int = 1
    ) -> None:
        """Take reserved slots; `num_passes` may be planned before ranks answer for the first."""
        self.arena = arena
        self._reservation = reservation
        self._keys_per_slot = slot_bytes // KEY_BYTES
        self.place = Board(arena.arena_id, tuple(reservation.slots.tolist()))
        self._capacity = self._keys_per_slot * len(self.place.slots)
        self._next = 0
        self._share = self._capacity // num_passes
        self.room = self._share
        """How many keys it still takes in this pass."""

    def begin_pass(self) -> None:
        """Take a pass's share of the board for the one that is being planned."""
        self.room = self._share

    def publish(self, keys: list[BlockKey]) -> KeyRun:
        """Write `keys`, at most `room` of them, and return where they are."""
        packed = b"".join(keys)
        start = self._next
        at = 0
        for view in _views(self.arena, self.place, self._keys_per_slot, start, len(keys)):
            view[:] = np.frombuffer(packed, dtype=np.uint8, count=len(view), offset=at)
            at += len(view)
        self._next = (start + len(keys)) % self._capacity
        self.room -= len(keys)
        return KeyRun(start, len(keys), xxhash.xxh3_64_intdigest(packed))

    def close(self) -> None:
        """Give the slots back; those of an arena that was left have come back with that."""
        self.arena.abort(self._reservation)


def open_board(arena: Arena, *, block_bytes: int, num_passes: int = 1) -> KeyBoard | None:
    """Reserve a board among the slots of that size; None if the arena has no room or no time."""
    stride = arena.tables.geometry.stride(block_bytes)
    slots = max(1, -(-_BOARD_BYTES // stride))
    keys = [BlockKey(secrets.token_bytes(KEY_BYTES)) for _ in range(slots)]
    made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=block_bytes)
    if made is None or not len(made.slots):
        return None
    return KeyBoard(arena, made, stride, num_passes=num_passes)


def read_keys(arena: Arena, board: Board, run: KeyRun) -> list[BlockKey] | None:
    """Return the keys of `run`; None if they are gone."""
    keys_per_slot = len(arena.slot_bytes(board.slots[0])) // KEY_BYTES
    views = _views(arena, board, keys_per_slot, run.start, run.num_keys)
    packed = b"".join(view.tobytes() for view in views)
    return split_keys(packed) if xxhash.xxh3_64_intdigest(packed) == run.check else None


def _views(arena: Arena, board: Board, keys_per_slot: int, start: int, count: int) -> list[Array]:
    """Return the bytes of `count` keys from `start` on, slot by slot, round the end."""
    views = []
    capacity = keys_per_slot * len(board.slots)
    while count:
        slot, first = divmod(start, keys_per_slot)
        taken = min(count, keys_per_slot - first)
        area = arena.slot_bytes(board.slots[slot])
        views.append(area[first * KEY_BYTES : (first + taken) * KEY_BYTES])
        start, count = (start + taken) % capacity, count - taken
    return views
