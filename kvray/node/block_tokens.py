"""The tokens of one engine's blocks, for its shard, which publishes KV events with them."""

from collections import deque
from typing import Any, NamedTuple, cast

from kvray.identity.block import BlockKey
from kvray.identity.keys import Packed

HASH_BYTES = 8
"""Leading bytes of a key that are the block's hash in KV events."""
_WAITING_MAX = 64 * 2**20  # bytes of tokens
_UNHEARD_MAX = 8 * 2**20  # the same before the shard has said whether it publishes anything
_FRAME_MAX = 2**20
_CHAINS_MAX = 2048  # in a frame, which may not have too many values
_TOLD_MAX = 500_000


class Chain(NamedTuple):
    """Blocks of one prompt, one after the other."""

    parent: bytes
    """The hash of the block before them; empty: they begin the prompt."""
    hashes: bytes
    tokens: bytes
    """Their tokens as u32 end to end, little-endian."""


class _Note(NamedTuple):
    keys: list[BlockKey]
    first: int
    end: int
    packed: Packed

    @property
    def size(self) -> int:
        return len(_bytes_of(self.packed))


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
            note = _Note(keys, first, len(keys), packed)
            self._noted += note.size
            self._waiting.append(note)

    def hear(self, generation: object) -> None:
        """Take the shard's word on what it knows."""
        heard = generation if isinstance(generation, int) else None
        self._waiting_max = 0 if heard is None else _WAITING_MAX
        if heard != self.generation:
            self._told.clear()
            self.generation = heard
        if heard is None:
            while self._waiting:
                self._taken += self._waiting.popleft().size

    def take(self, tokens_per_block: int) -> list[Chain]:
        """Return what to tell next, about a frame's worth; nothing: all was told.

        It counts as told: who cannot tell it has to `forget`.
        """
        chains: list[Chain] = []
        size = 0
        while self._waiting and size < _FRAME_MAX and len(chains) < _CHAINS_MAX:
            note = self._waiting.popleft()
            self._taken += note.size
            at, end = self._untold(note, _FRAME_MAX // (4 * tokens_per_block))
            if at < end:
                chains.append(_chain(note, at, end, tokens_per_block))
                self._told.update(note.keys[at:end])
                size += len(chains[-1].tokens)
            if end < note.end:
                self._taken -= note.size
                self._waiting.appendleft(note)
        return chains

    def forget(self) -> None:
        """Have everything told again, as prompts come."""
        self._told.clear()

    def _untold(self, note: _Note, blocks_max: int) -> tuple[int, int]:
        """Return the first block of a note that was not told, and where a frame's worth ends."""
        if len(self._told) > _TOLD_MAX:
            self._told.clear()
        at, end = note.first, note.end
        while at < end:  # Those that were told come first: no block is told without its head.
            middle = (at + end) // 2
            at, end = (middle + 1, end) if note.keys[middle] in self._told else (at, middle)
        return at, min(note.end, at + max(1, blocks_max))


def _chain(note: _Note, at: int, end: int, tokens_per_block: int) -> Chain:
    start, stop = (4 * tokens_per_block * (one - note.first) for one in (at, end))
    return Chain(
        parent=note.keys[at - 1][:HASH_BYTES] if at else b"",
        hashes=b"".join(key[:HASH_BYTES] for key in note.keys[at:end]),
        tokens=bytes(_bytes_of(note.packed)[start:stop]),
    )


def _bytes_of(packed: Packed) -> memoryview:
    return memoryview(cast(Any, packed)).cast("B")
