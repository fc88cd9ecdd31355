"""What the leader keeps of a request between its first query and its end; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvray.arrival import Arrivals
from kvray.block import BlockKey
from kvray.connector.promise import Promise
from kvray.connector.retention import Priorities
from kvray.errors import LayoutMismatch
from kvray.keys import MediaItem, chain_keys

NO_PAGE = -1


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request's tokens, keys and pages, and how much of it is saved."""

    request_id: int
    seed: bytes
    tokens_per_block: int
    media: tuple[MediaItem, ...] = ()
    tenant_id: int = 0
    """What an arena knows the request's tenant by; 0: it has none."""
    opening: bytes = b""
    """Digest of how the prompt begins."""
    windowed: tuple[bool, ...] = (False,)
    """For each layer group, whether its blocks may have no page."""
    num_tokens: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    pages: tuple[list[int], ...] = ()
    """For each layer group the page of each block, in prompt order."""
    priorities: Priorities = field(default_factory=Priorities)
    num_saved: int = 0
    """Leading blocks that are in the tier, or were handed to the workers to save."""
    num_found: int = 0
    """Leading blocks that were in the tier when the prompt was matched."""
    arrivals: Arrivals = ()
    """How the blocks that were found came to this node, as far as they were not there."""
    promise: Promise | None = None
    _prompt: list[int] | None = None
    """What `prompt_keys` was given, until the first report."""
    _tail: list[int] = field(default_factory=list)
    """The tokens that no key covers yet."""

    def prompt_keys(self, tokens: list[int]) -> list[BlockKey]:
        """Return the keys of all full blocks of the prompt, and remember them; owns `tokens`."""
        self._prompt = tokens
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

        Args:
            tokens: new ones.
            pages: for each layer group those of new blocks.
            new: whether it is the first report.
            priorities: of the first group's new blocks, see `retention`.
        """
        at = 0 if new or not self.pages else len(self.pages[0])
        self.priorities.extend(priorities, at=at, count=len(pages[0]))
        if new:
            # Mostly what the query was given; a replay may have grown.
            if tokens != self._prompt:
                self.prompt_keys(list(tokens))
            self.pages = tuple(list(group) for group in pages)
            self._prompt = None
            if self.priorities.are_raised(self.num_found):
                self.num_saved = 0  # what is in the tier is to be kept longer from now on
            return
        if tokens:
            self.num_tokens += len(tokens)
            self._tail.extend(tokens)
        for group, more in zip(self.pages, pages, strict=True):
            group.extend(more)

    def load_pages(self, first: int, end: int) -> tuple[list[int], ...]:
        """Return for each layer group the pages of the blocks from `first` to `end`.

        Raises:
            LayoutMismatch: the engine counts on these blocks, but has no page for one of them.
        """
        found = tuple(group[first:end] for group in self.pages)
        for pages, may_miss in zip(found, self.windowed, strict=True):
            if len(pages) < end - first or (not may_miss and min(pages, default=0) < 0):
                raise LayoutMismatch(
                    f"The engine took {end - first} blocks for request {self.request_id} but names"
                    f" pages for {sum(page >= 0 for page in pages)} of them; it would read what"
                    " nobody has written."
                )
        return found

    def rewind(self, position: int) -> None:
        """Have saved what was computed, if the engine has dropped a pass that it had planned."""
        done = max(self.num_found, position // self.tokens_per_block)
        self.num_saved = min(self.num_saved, done)

    def savable(self, computed_tokens: int) -> int:
        """Return where the blocks end that are full after a pass and have their pages.

        Args:
            computed_tokens: leading tokens whose KV is in the pool after the pass.
        """
        end = min(computed_tokens, self.num_tokens) // self.tokens_per_block
        end = min(end, *map(len, self.pages)) if self.pages else 0
        for group, may_miss in zip(self.pages, self.windowed, strict=True):
            if not may_miss and end > self.num_saved:
                fresh = group[self.num_saved : end]
                if NO_PAGE in fresh:
                    end = self.num_saved + fresh.index(NO_PAGE)
        return max(end, self.num_saved)

    def keys_until(self, end: int) -> list[BlockKey]:
        """Return the keys of the first `end` blocks."""
        if end > len(self.keys):
            self._extend_keys()
        return self.keys[:end]

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
