"""What the leader knows of one request between its first query and its end; pure.

`Identity` is what besides its tokens distinguishes it: salt, tenant, LoRA adapter and media. A
report is what one pass has that is new about a request. It may have retention priorities, 0 to 100.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvray.engine.meta import Promise
from kvray.errors import LayoutMismatch
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.identity.keys import MediaItem, chain_packed, pack, pack_tokens
from kvray.node import BlockTokens, PromptCounts
from kvray.store.arena.layout import DEFAULT_PRIORITY, PRIORITY_MAX
from kvray.trace.arrival import Arrivals
from kvray.trace.reasons import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What enters the keys of a request beside its tokens."""

    salt: str | int | None = None
    lora: bytes | None = None
    media: tuple[MediaItem, ...] = ()
    tenant_id: int = 0  # what an arena knows the request's tenant by; 0: it has none


class Prompt(NamedTuple):
    """A prompt that has keys, or would have them if its model had a name."""

    request_id: int
    tokens: list[int]
    prompt_len: int  # tokens that the engine counts as the prompt; at most all
    num_computed: int  # leading tokens that the engine has itself
    identity: Identity
    is_unread: bool = False
    """Whether it reads no cache: it is saved, and promised nothing."""
    name: str = ""
    """What the engine's server calls it, if it has a name."""

    def num_askable(self, tokens_per_block: int) -> int:
        """Return how many leading blocks may be promised: the engine computes the last token."""
        return max(0, (self.prompt_len - 1) // tokens_per_block)


_DEFAULT = bytes([DEFAULT_PRIORITY])


def read_priorities(report: Any) -> bytes:
    """Return the priorities of a report's new pages, one byte each; empty where it has none.

    What is out of range is taken for the nearest that is not; what are no numbers says nothing.

    Source: `RequestData.priorities`, a list as long as `new_block_ids`, or None for requests
    without a `KvCacheRetentionConfig`; older versions have no such field.
    """
    asked = getattr(report, "priorities", None)
    if not isinstance(asked, list | tuple):
        return b""
    try:
        numbers = np.array(asked, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return b""
    return numbers.clip(0, PRIORITY_MAX).astype(np.uint8).tobytes() if numbers.ndim == 1 else b""


NO_PAGE = -1


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request's tokens, keys and pages, and how much of it is saved."""

    request_id: int
    seed: bytes
    tokens_per_block: int
    namespace: bytes = b""  # digest of the one that its keys are in
    media: tuple[MediaItem, ...] = ()
    tenant_id: int = 0  # the tenant's number in an arena; 0: none
    block_tokens: BlockTokens | None = None
    """Notes the tokens of its blocks; None: more than tokens enters its keys."""
    windowed: tuple[bool, ...] = (False,)
    """For each layer group, whether its blocks may have no page."""
    counts: PromptCounts = field(default_factory=PromptCounts)
    num_tokens: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    pages: tuple[list[int], ...] = ()
    """For each layer group the page of each block, in prompt order."""
    allocated: Sequence[Sequence[int]] = ()
    """For each layer group the pages that the engine named at the request's allocation."""
    is_reported: bool = False  # whether the engine has reported it since it was asked about
    is_later_life: bool = False
    """Whether the engine reports deltas to an earlier request of its id."""
    priorities: bytearray = field(default_factory=bytearray)
    """Retention priorities of its blocks, in prompt order; those that follow have the default."""
    num_saved: int = 0
    """Leading blocks that are in the tier, or were handed to the workers to save."""
    num_full: int = 0
    """Leading blocks that are full after the last pass; those not saved by the end are lost."""
    num_found: int = 0  # leading blocks that were in the tier when the prompt was matched
    arrivals: Arrivals = ()
    """How the found blocks came to this node, as far as they were not there."""
    promise: Promise | None = None
    savable_blocks: int | None = None
    """Leading blocks whose pages stay as they were reported, which alone are saved; None: all."""
    unsaved: DropReason | None = None
    """Why nothing more of it is saved: its pages depend on more than its keys."""
    prompt: list[int] | None = None
    """The tokens that `prompt_keys` got, until the first report."""
    _tail: list[int] = field(default_factory=list)  # the tokens that no key covers yet

    def prompt_keys(self, tokens: list[int]) -> list[BlockKey]:
        """Return the keys of all full blocks of the prompt, and remember them; owns `tokens`."""
        self.prompt = tokens
        self.num_tokens = len(tokens)
        self.keys, self._tail = [], tokens
        self._extend_keys()
        return self.keys

    def extend(
        self,
        tokens: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        new: bool,
        priorities: bytes = b"",
    ) -> None:
        """Take an engine's report: deltas over the request's life, the first with all so far.

        An engine may remember what it has reported of an id, also when the request has ended. For
        a reused id it reports only tokens beyond the longest earlier request, which we cannot use.
        Such a request has the tokens of its query, and the pages of its allocation.

        `priorities` are of the first group's new blocks, perhaps too many or few of them; `new`:
        the id's first report.
        """
        self.is_later_life = not new and (self.is_later_life or not self.is_reported)
        if self.is_later_life and not self.is_reported:
            known = self.allocated if len(self.allocated) == len(self.windowed) else ()
            self.pages = tuple(list(group) for group in known or ((),) * len(self.windowed))
            self.prompt = None
        self.is_reported = True
        if self.is_later_life:
            return
        at = 0 if new else len(self.pages[0])
        if priorities:
            unnamed = _DEFAULT * (at - len(self.priorities))
            self.priorities += unnamed + priorities[: len(pages[0])]
        if new:
            # Mostly what the query was given; a replay may have grown.
            if tokens != self.prompt:
                self.prompt_keys(list(tokens))
            self.pages = tuple(list(group) for group in pages)
            self.prompt = None
            if max(self.priorities[: self.num_found], default=0) > DEFAULT_PRIORITY:
                self.num_saved = 0  # what is in the tier is to be kept longer from now on
            return
        if tokens:
            self.num_tokens += len(tokens)
            self._tail.extend(tokens)
        for group, more in zip(self.pages, pages, strict=True):
            group.extend(more)

    def load_pages(self, first: int, end: int) -> tuple[list[int], ...]:
        """Return for each layer group the pages of the blocks from `first` to `end`.

        LayoutMismatch: the engine counts on these blocks, but has no page for one of them.
        """
        found = tuple(group[first:end] for group in self.pages)
        for pages, may_miss in zip(found, self.windowed, strict=True):
            if len(pages) < end - first or (not may_miss and min(pages, default=0) < 0):
                raise LayoutMismatch(
                    f"The engine took {end - first} blocks for request {self.request_id}, with"
                    f" pages for {sum(page >= 0 for page in pages)} of them; nobody wrote the rest."
                )
        return found

    def unlike_at(self, seed: bytes, media: Sequence[MediaItem]) -> int | None:
        """Return the first token at which another chain leaves this one; None: it is this one."""
        if seed != self.seed:
            return 0
        if not media and not self.media:
            return None  # as mostly
        unlike = set(media).symmetric_difference(self.media)
        return min((item.position for item in unlike), default=None)

    def rewind(self, position: int) -> None:
        """Save computed blocks again if the engine dropped a pass that was planned."""
        done = max(self.num_found, position // self.tokens_per_block)
        self.num_saved = min(self.num_saved, done)

    def savable(self, computed_tokens: int) -> int:
        """Return where the blocks end that are full after a pass and have their pages.

        `computed_tokens` are the leading tokens whose KV is in the pool after the pass.
        """
        end = min(computed_tokens, self.num_tokens) // self.tokens_per_block
        end = self.num_full = end if self.savable_blocks is None else min(end, self.savable_blocks)
        if self.unsaved is not None:
            return self.num_saved
        end = min(end, *map(len, self.pages)) if self.pages else 0
        for group, may_miss in zip(self.pages, self.windowed, strict=True):
            if not may_miss and end > self.num_saved:
                fresh = group[self.num_saved : end]
                if NO_PAGE in fresh:
                    end = self.num_saved + fresh.index(NO_PAGE)
        return max(end, self.num_saved)

    def priorities_of(self, first: int, end: int) -> bytes:
        """Return those of the blocks from `first` to `end`; empty if all have the default."""
        found = bytes(self.priorities[first:end])
        return found.ljust(end - first, _DEFAULT) if found.strip(_DEFAULT) else b""

    def keys_until(self, end: int) -> list[BlockKey]:
        """Return the keys of the first `end` blocks."""
        if end > len(self.keys):
            self._extend_keys()
        return self.keys[:end]

    def _extend_keys(self) -> None:
        first, media = len(self.keys), self.media
        start, packed = first * self.tokens_per_block, pack(self._tail)
        if media and start:
            media = tuple(
                MediaItem(position=item.position - start, digest=item.digest)
                for item in media
                if item.position >= start
            )
        self.keys += chain_packed(
            packed,
            tokens_per_block=self.tokens_per_block,
            seed=self.keys[-1] if self.keys else self.seed,
            media=media,
        )
        if self.block_tokens is not None:
            self.block_tokens.note(self.keys, first, packed)
        self._tail = self._tail[len(self.keys) * self.tokens_per_block - start :]


_ROOT = BlockKey(bytes(KEY_BYTES))
_OPEN_MAX = 1024
"""Prompts followed; of those that were heard of longest ago only the notes stay."""
_NOTES_MAX = 65_536
"""Notes kept; the oldest are forgotten."""

_Note: TypeAlias = tuple[BlockKey, bytes]
"""Key of the blocks before a token, and the packed tokens from there on, it being the last."""


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt that is not known to be computed to its end."""

    tokens: npt.NDArray[np.int32]
    keys: list[BlockKey]
    """Of the blocks before each block."""
    note: _Note | None = None


class UnwrittenTokens:
    """Where an engine's own prefix cache may have tokens that nobody computed, or on such ones.

    Of each prompt that is under way the first token is noted that is not known to be computed. One
    that ends without a word leaves its note. A request that reuses such a token computes on bytes
    of anything, and leaves a note of the first token in a page of its own: the engine's cache keeps
    what it has computed. Tokens alone decide, so a request needs no keys of ours; where the cache
    tells salts or adapters apart, too, less is saved than could be.

    The last token of a prompt on sound ones is never noted: the cache has it only behind one that
    was sampled, and so behind its pass. Where blocks are found whole, or not at all, the note is of
    all of the prompt in its block: others that merely begin like it are others' blocks.

    Source: `WindowBlockManager::storeBlocksForReuse` and `KVCacheBlock::findMatchingBlock`.
    """

    def __init__(self, tokens_per_block: int, *, finds_parts: bool) -> None:
        """`finds_parts`: a request may reuse the first tokens of a block that goes on otherwise."""
        self._size = tokens_per_block
        self._finds_parts = finds_parts
        self._open: dict[int, _OpenPrompt] = {}
        self._notes: dict[_Note, int] = {}
        """How many prompts have left each."""
        self._places = Counter[BlockKey]()
        """Notes behind each key; most keys have none."""

    def begin(self, request_id: int, tokens: Sequence[int], num_computed: int) -> bool:
        """Follow a prompt, `num_computed` tokens of which the engine has; may one be unwritten?"""
        size, packed, keys = self._size, pack_tokens(tokens), [_ROOT]
        keys += chain_packed(packed, tokens_per_block=size, seed=_ROOT)
        unsure = (
            start + count - 1
            for start, key in zip(range(0, num_computed, size), keys, strict=False)
            if key in self._places
            for count in range(1, min(size, num_computed - start) + 1)
            if (key, packed[start : start + count].tobytes()) in self._notes
        )
        first = next(unsure, None)
        # What another life of this id has noted stays: its pages may be those that are reused now.
        self._open.pop(request_id, None)
        prompt = _OpenPrompt(packed, keys)
        if first is None:
            self._open[request_id] = prompt
            self.confirm(request_id, num_computed)
        else:  # its note stays, whatever it computes; a block reused in part is a copy of its own
            self._note(prompt, max(first, num_computed // size * size), len(packed))
        while len(self._open) > _OPEN_MAX:
            del self._open[next(iter(self._open))]
        while len(self._notes) > _NOTES_MAX:
            self._erase(next(iter(self._notes)))
        return first is not None

    def confirm(self, request_id: int, num_computed: int) -> None:
        """Note that so many leading tokens of a prompt are computed; nothing if it is over."""
        if (prompt := self._open.pop(request_id, None)) is None:
            return
        if prompt.note in self._notes:  # else it was forgotten
            self._notes[prompt.note] -= 1
            if not self._notes[prompt.note]:
                self._erase(prompt.note)
        num_found = len(prompt.tokens) - 1
        if num_computed < num_found:
            self._open[request_id] = prompt  # as the last that was heard of
            self._note(prompt, max(0, num_computed), num_found)

    def end(self, request_id: int) -> None:
        """A request has ended; its note stays, unless the whole prompt is computed."""
        self._open.pop(request_id, None)

    def _note(self, prompt: _OpenPrompt, first: int, end: int) -> None:
        """Note the token at `first` of a prompt of which the cache finds those before `end`."""
        block = first // self._size
        start = block * self._size
        stop = first + 1 if self._finds_parts else min(start + self._size, end)
        prompt.note = prompt.keys[block], prompt.tokens[start:stop].tobytes()
        if prompt.note not in self._notes:
            self._places[prompt.note[0]] += 1
        self._notes[prompt.note] = self._notes.get(prompt.note, 0) + 1

    def _erase(self, note: _Note) -> None:
        del self._notes[note]
        self._places[note[0]] -= 1
        if not self._places[note[0]]:
            del self._places[note[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """For engines without such a record of their own; fields as in TensorRT-LLM's `RequestData`."""

    request_id: int
    new_tokens: list[int]  # since the last report; the first has all of them
    new_block_ids: list[int]  # likewise
    computed_position: int
    """Where the pass begins, without the tokens that were promised for this very pass."""
    num_scheduled_tokens: int
    is_new: bool  # whether it is the first since the request was asked about
