"""What the leader keeps of each request, and what it tells the workers for a pass; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvray.block import BlockKey
from kvray.errors import LayoutMismatch
from kvray.keys import MediaItem, chain_keys
from kvray.store import Arena, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Blocks of one request to be copied from leased slots before the pass."""

    request_id: int
    arena_id: str
    """The arena that the leases are of."""
    leases: tuple[Lease, ...]
    """One a rank; each rank copies from its own, and releases it."""
    first: int
    """Place in the lease of the first block to copy."""
    block_ids: bytes
    """i32 each, in prefix order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Full blocks of one request to be copied to the tier after the pass."""

    request_id: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    depth: int
    block_ids: bytes
    """i32 each, in prefix order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorMeta:
    """The metadata of one pass, the same for every rank; small, and it pickles."""

    namespace: bytes = b""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Matched tokens that the leader has offered to the engine and holds in leases."""

    arena: Arena
    leases: tuple[Lease, ...]
    first: int
    """Blocks that the engine had itself."""
    num_blocks: int


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request between its first query and its end."""

    request_id: int
    seed: bytes
    tokens_per_block: int
    media: tuple[MediaItem, ...]
    num_tokens: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_saved: int = 0
    """Leading blocks that are in the tier, or were handed to the workers to save."""
    promise: Promise | None = None
    _prompt: list[int] | None = None
    """What `prompt_keys` was given, until the first report."""
    _tail: list[int] = field(default_factory=list)
    """The tokens that no key covers yet."""

    def prompt_keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        """Return the keys of all full blocks of the prompt, and remember them."""
        self._prompt = list(tokens)
        self.num_tokens = len(self._prompt)
        self.keys, self._tail = [], self._prompt
        self._extend_keys()
        return self.keys

    def extend(self, new_tokens: Sequence[int], new_block_ids: Sequence[int], *, new: bool) -> None:
        """Take an engine's report: deltas over the request's life, the first with all so far."""
        if new:
            if self._prompt is None or list(new_tokens) != self._prompt:
                self.prompt_keys(new_tokens)
            self.block_ids, self._prompt = [], None
        else:
            self.num_tokens += len(new_tokens)
            self._tail.extend(new_tokens)
        self.block_ids.extend(new_block_ids)

    def take_load(self, computed_position: int) -> LoadPlan | None:
        """Return the load that the promise amounts to; None if the engine did not accept it.

        `computed_position` is where the engine stood without the promised tokens.

        Raises:
            LayoutMismatch: the engine counts on the promise, but has no block for all of it.
        """
        promise = self.promise
        if promise is None or computed_position != promise.first * self.tokens_per_block:
            return None
        block_ids = self.block_ids[promise.first : promise.first + promise.num_blocks]
        if len(block_ids) < promise.num_blocks or min(block_ids, default=-1) < 0:
            raise LayoutMismatch(
                f"The engine took {promise.num_blocks} blocks for request {self.request_id} but"
                f" names pages for {sum(block_id >= 0 for block_id in block_ids)} of them; kvray"
                " does not serve caches that give up pages of a prompt."
            )
        return LoadPlan(
            request_id=self.request_id,
            arena_id=promise.arena.arena_id,
            leases=promise.leases,
            first=promise.first,
            block_ids=pack_ids(block_ids),
        )

    def take_save(self, computed_tokens: int) -> SavePlan | None:
        """Return the blocks that are full after a pass and not saved yet.

        Args:
            computed_tokens: leading tokens whose KV is in the pool after the pass.
        """
        full = min(computed_tokens, self.num_tokens) // self.tokens_per_block
        full = min(full, len(self.block_ids))
        block_ids = self.block_ids[self.num_saved : full]
        # The second cache manager marks blocks without a page by -1: nothing to read there.
        missing = next((place for place, block_id in enumerate(block_ids) if block_id < 0), None)
        block_ids = block_ids[:missing]
        if not block_ids:
            return None
        first, last = self.num_saved, self.num_saved + len(block_ids)
        if last > len(self.keys):
            self._extend_keys()
        self.num_saved = last
        return SavePlan(
            request_id=self.request_id,
            keys=tuple(self.keys[first:last]),
            parent=self.keys[first - 1] if first else None,
            depth=first,
            block_ids=pack_ids(block_ids),
        )

    def _extend_keys(self) -> None:
        """Key the full blocks of the tail."""
        start = len(self.keys) * self.tokens_per_block
        self.keys += chain_keys(
            self._tail,
            tokens_per_block=self.tokens_per_block,
            seed=self.keys[-1] if self.keys else self.seed,
            media=[
                MediaItem(position=item.position - start, digest=item.digest)
                for item in self.media
                if item.position >= start
            ],
        )
        self._tail = self._tail[len(self.keys) * self.tokens_per_block - start :]


def promised_blocks_max(num_tokens: int, tokens_per_block: int) -> int:
    """Return how many leading blocks may be promised: at least one token must be computed."""
    return (num_tokens - 1) // tokens_per_block


def pack_ids(block_ids: Sequence[int]) -> bytes:
    """Return block ids as 4 bytes each."""
    return np.asarray(block_ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return what `pack_ids` packed."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)
