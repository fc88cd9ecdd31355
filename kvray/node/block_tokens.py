"""The tokens of one engine's blocks, for its shard, which publishes KV events with them."""

from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple, cast

import numpy as np

from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.identity.keys import Packed

HASH_BYTES = 8
"""Leading bytes of a key that are the block's hash in KV events."""
_WAITING_MAX = 64 * 2**20  # bytes of tokens
_UNHEARD_MAX = 8 * 2**20  # the same before the shard has said whether it publishes anything
_FRAME_MAX = 2**18  # larger ones cost several times as much a byte: the memory is new each time
_CHAINS_MAX = 2048  # in a frame, which may not have too many values
_STRIDE = 16  # of so many blocks one is remembered as told: up to as many are told twice
_TOLD_MAX = 50_000


class Chain(NamedTuple):
    """Blocks of one prompt, one after the other."""

    parent: bytes
    """The hash of the block before them; empty: they begin the prompt."""
    hashes: bytes
    tokens: memoryview
    """Their tokens as u32 end to end, little-endian."""


class _Note(NamedTuple):
    keys: list[BlockKey]
    first: int
    end: int
    tokens: memoryview
    """Bytes, from those of block `first` on."""


class BlockTokens:
    """What waits to be told, and what was told already.

    The engine's thread notes, in about a microsecond and without a lock; the link's thread takes
    and tells. Each of the two counts is written by one of them. Of too much the engine notes no
    more; a prompt that comes again is noted again.
    """

    def __init__(self) -> None:
        self.generation: int | None = None
        """The shard's number of what it was told, to be told again where it changes; None: the
        shard publishes nothing."""
        self._waiting: deque[_Note] = deque()
        self._waiting_max = _UNHEARD_MAX
        self._noted = self._taken = 0
        self._told: set[BlockKey] = set()

    def note(self, keys: list[BlockKey], first: int, packed: Packed) -> None:
        """Note the blocks from `first` on, whose tokens begin `packed`; neither changes later.

        More keys may be appended.
        """
        if self._noted - self._taken < self._waiting_max:
            tokens = memoryview(cast(Any, packed)).cast("B")
            self._noted += len(tokens)
            self._waiting.append(_Note(keys, first, len(keys), tokens))

    def hear(self, generation: object) -> None:
        """Take the shard's word on what it knows."""
        heard = generation if isinstance(generation, int) else None
        self._waiting_max = 0 if heard is None else _WAITING_MAX
        if heard != self.generation:
            self._told.clear()
            self.generation = heard
        if heard is None:
            while self._waiting:
                self._taken += len(self._waiting.popleft().tokens)

    def take(self, tokens_per_block: int) -> list[Chain]:
        """Return what to tell next, about a frame's worth; nothing: all was told.

        It counts as told: who cannot tell it has to `forget`.
        """
        chains: list[Chain] = []
        size, step = 0, 4 * tokens_per_block
        while self._waiting and size < _FRAME_MAX and len(chains) < _CHAINS_MAX:
            note = self._waiting.popleft()
            self._taken += len(note.tokens)
            at = self._untold_from(note)
            end = min(note.end, at + max(1, _FRAME_MAX // step))
            if at < end:
                start, stop = (step * (one - note.first) for one in (at, end))
                chains.append(_chain(note.keys, at, end, note.tokens[start:stop]))
                self._told.update(note.keys[at | (_STRIDE - 1) : end : _STRIDE])
                self._told.add(note.keys[end - 1])
                size += stop - start
            if end < note.end:
                rest = note._replace(first=end, tokens=note.tokens[step * (end - note.first) :])
                self._taken -= len(rest.tokens)
                self._waiting.appendleft(rest)
        return chains

    def forget(self) -> None:
        """Have everything told again, as prompts come."""
        self._told.clear()

    def _untold_from(self, note: _Note) -> int:
        """Return the first block of a note that may not have been told; its end: all were."""
        if len(self._told) > _TOLD_MAX:
            self._told.clear()
        if note.keys[note.end - 1] in self._told:
            return note.end
        # Those that were told come first: no block is told without its head.
        marks = range(note.first | (_STRIDE - 1), note.end, _STRIDE)
        num_told = bisect_left(marks, True, key=lambda at: note.keys[at] not in self._told)
        return marks[num_told - 1] + 1 if num_told else note.first


def _chain(keys: list[BlockKey], at: int, end: int, tokens: memoryview) -> Chain:
    words = np.frombuffer(b"".join(keys[at:end]), f"V{HASH_BYTES}")
    parent = keys[at - 1][:HASH_BYTES] if at else b""
    return Chain(parent, words[:: KEY_BYTES // HASH_BYTES].tobytes(), tokens)
