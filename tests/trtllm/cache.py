"""The engine's own cache manager: pages of every layer group, and prefixes that it reuses.

With one pool the connector is asked when a request gets its pages, and all of its offer is taken.
With layer groups it is asked apart from that, some of the offer may be taken, and pages come with
each chunk; one version asks ahead, for requests that are then left out of the batch.

With one pool or partial reuse, prompts are found as soon as they are computed. With partial reuse a
block is also found if only its first tokens are alike. Its page is copied whole, with the other
request's rows behind them, and that request goes on. The first manager takes over a page that
nobody uses and nothing follows.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from kvray.errors import KVRayError
from kvray.reference.cache_manager import BlockPool
from kvray.reference.request import ScheduledRequests
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, NO_PAGE, Memory

SEND_POLLS = 5
"""Iterations that it takes to send a prompt's blocks to a server that generates."""
DUMMY_ID = 2**64 - 1


@dataclass(kw_only=True)
class Cache:
    """What the executor asks of a cache manager; the same on all ranks, which count alike."""

    memory: Memory
    windows: Sequence[int | None]
    num_pages: InitVar[int]
    has_groups: bool
    resolves_late: bool
    is_reused: bool = True
    is_partial: bool = False
    draft_len: int = 0
    """Tokens that are drafted after each one that is computed for an answer."""
    connector: Any = None
    asked: Callable[[ScheduledRequests], None] = lambda _batch: None
    """Called once the connector was asked about a batch, before it is reported."""
    accept: Callable[[LlmRequest, int], int] = lambda _request, offer: offer
    """Returns how many tokens of an offer the engine takes."""
    defers: Callable[[LlmRequest], bool] = lambda _request: False
    """Says whether a request that was asked about ahead is left out of the batch."""
    dummy: LlmRequest | None = None
    """Pads every batch that generates."""
    sending: dict[LlmRequest, int] = field(default_factory=dict)
    """Prompts that are sent to another server -> iterations until it has their blocks."""

    def __post_init__(self, num_pages: int) -> None:
        self._luck = random.Random(self.draft_len)
        self._pools = [BlockPool(num_pages, tokens_per_block=BLOCK) for _ in self.windows]
        self._held: dict[LlmRequest, list[list[int]]] = {}

    def pages_of(self, request: LlmRequest) -> list[list[int]]:
        """Return a request's pages, one list a layer group."""
        return self._held[request]

    def first_live(self, group: int, history: int) -> int:
        """Return the first block that the next token still looks back to."""
        window = self.windows[group]
        return 0 if window is None else max(0, (history - window + 1) // BLOCK)

    def get_num_free_blocks(self) -> int:
        return min(pool.num_free for pool in self._pools)

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Return the pages that it takes if it shares none and is drafted for to its end."""
        most = request.prompt_len + request.max_new_tokens + 1 + 2 * self.draft_len
        return -(-most // BLOCK)

    def get_needed_beyond_held(self, request: LlmRequest) -> int:
        held, *_ = self._held.get(request, [[]])
        return max(self.get_needed_resource_to_completion(request) - len(held), 0)

    def get_cache_indices(self, request: LlmRequest) -> list[list[int]]:
        """Return copies of a request's pages; none for one that has ended, and is asked for again.

        So its end is announced twice if it came early, while the next batch ran. KVRayError: the
        engine knows better, as it was cancelled.
        """
        if request in self._held:
            return [list(pages) for pages in self._held[request]]
        if request.finish_reason == "cancelled":
            raise KVRayError(f"Request {request.request_id} holds no pages.")
        return [[] for _ in self.windows]

    def prepare_resources(self, batch: ScheduledRequests) -> None:
        """Give the batch its pages, and ask what can be loaded into them."""
        if self.resolves_late:
            batch.context_requests[:] = [
                one for one in batch.context_requests if self._ask_ahead(one)
            ]
        for request in batch.context_requests:
            if not request.has_pages:
                self._add(request)
            elif self.has_groups:
                start = request.context_current_position
                self.extend(request, start + request.context_chunk_size, history=start)
        for request in batch.generation_requests:
            if self.draft_len:
                request.draft(self.draft_len, self._luck.randint(0, self.draft_len))
            start = request.num_computed_tokens
            self.extend(request, start + 1 + self.draft_len, history=start)
        if self.dummy is not None and batch.generation_requests:
            self._held.setdefault(self.dummy, [[] for _ in self.windows])
            self.extend(self.dummy, 1, history=0)
            batch.generation_requests.append(self.dummy)
        self.asked(batch)
        if batch.batch_size:
            self.connector.build_scheduler_output(batch, self.get_cache_indices)

    def update_resources(self, batch: ScheduledRequests) -> None:
        """Let others find computed prompts, and give back what only rejected drafts have used."""
        is_early = self.is_partial or (self.is_reused and not self.has_groups)
        for request in batch.context_requests if is_early else ():
            if request in self._held and (self.has_groups or not request.is_in_context):
                self._remember(request, self._held[request], keep_tail=False)
        for request in batch.generation_requests if self.draft_len else ():
            kept = -(-request.num_computed_tokens // BLOCK)
            for group, pages in enumerate(self._held.get(request, ())):
                self._release(group, pages[kept:])
                del pages[kept:]

    def free_resources(self, request: LlmRequest) -> None:
        """End a sequence, and keep what it computed for others. Twice is fine.

        There is no way to keep its pages for a connector: kvray may not ask for that.
        """
        is_sent = request.is_only_prefilled and request.finish_reason in {"length", "stop"}
        if is_sent and self.sending.setdefault(request, SEND_POLLS):
            return
        held = self._held.pop(request, None)
        if held is None:
            return
        if self.is_reused and request.request_id != DUMMY_ID:
            self._remember(request, held, keep_tail=self.is_partial)
        for group, pages in enumerate(held):
            self._release(group, pages)

    def extend(self, request: LlmRequest, num_tokens: int, *, history: int) -> None:
        """Have pages for the first `num_tokens` tokens; none for blocks that `history` is past."""
        for group, pages in enumerate(self._held[request]):
            for block in range(len(pages), -(-num_tokens // BLOCK)):
                is_live = block >= self.first_live(group, history)
                pages.append(self._take(group) if is_live else NO_PAGE)

    def pass_windows(self, request: LlmRequest, history: int) -> None:
        """Give back pages that no window reaches any more; their places stay."""
        for group, pages in enumerate(self._held[request]):
            for block in range(min(len(pages), self.first_live(group, history))):
                self._release(group, pages[block : block + 1])
                pages[block] = NO_PAGE

    def replace_pages(self, request: LlmRequest) -> None:
        """Put equal pages of others in the place of those that a prompt's pass has computed.

        Source: `_KVCache._commit_block`, `allow_seq_rebasing`, of the second manager.
        """
        if not self.is_reused or request not in self._held:
            return
        self._remember(request, self._held[request], keep_tail=False)
        computed = request.num_computed_tokens // BLOCK * BLOCK
        matches = self._matches(request, computed, allow_partial=False)
        for group, (pages, match) in enumerate(zip(self._held[request], matches, strict=True)):
            for block, page in enumerate(match.block_ids[: len(pages)]):
                if pages[block] not in (NO_PAGE, page):
                    self._pools[group].reference([page])
                    self._release(group, [pages[block]])
                    pages[block] = page

    def _ask_ahead(self, request: LlmRequest) -> bool:
        """Ask once, and perhaps leave the request out; what was offered waits meanwhile."""
        if request.has_pages:
            return True
        if request.offer is None and not request.is_generation_only_request:
            local = self._open(request)
            request.offer = (local, local + self.connector.query(request, local))
        return not self.defers(request)

    def _add(self, request: LlmRequest) -> None:
        """Give a request its first pages, with what is taken of an offer."""
        take = self._take_some if self.has_groups else self._take_all
        local, taken = take(request)
        if self.has_groups:  # these came before the connector was asked
            self.extend(request, local + request.context_chunk_size, history=local)
        request.set_prepopulated_prompt_len(local + taken, BLOCK)
        if self.has_groups:
            start = request.context_current_position
            self.pass_windows(request, start)
            self.extend(request, start + request.context_chunk_size, history=start)
        request.has_pages, request.num_hit = True, taken
        self.connector.update_state_after_alloc(request, self.get_cache_indices(request))

    def _take_all(self, request: LlmRequest) -> tuple[int, int]:
        """Return how many tokens the engine has itself, and how many of the offer it takes."""
        local = self._open(request)
        self.extend(request, request.prompt_len, history=0)
        taken = self.connector.get_num_new_matched_tokens(request, local)
        return local, taken if self.is_reused else 0  # asked, and then not heard

    def _take_some(self, request: LlmRequest) -> tuple[int, int]:
        """As `_take_all`, with an offer of which the engine may take less."""
        local = self._open(request) if request.offer is None else request.offer[0]
        if request.is_generation_only_request:
            return local, 0
        if request.offer is None:
            request.offer = (local, local + self.connector.query(request, local))
        _, end = request.offer
        taken = self.accept(request, end - local) if self.is_reused else 0
        self.connector.cancel_load(request, local + taken, end)
        self.connector.commit(request, taken)
        return local, taken

    def _open(self, request: LlmRequest) -> int:
        """Open a sequence with what is reused of its prefix; return how many tokens that are."""
        held: list[list[int]] = [[] for _ in self.windows]
        self._held[request] = held
        if not self.is_reused:
            return 0
        matches = self._matches(request, request.prompt_len - 1, allow_partial=False)
        found = [list(match.block_ids) for match in matches]
        num_blocks = min(map(len, found))
        for group, pages in enumerate(found):
            first = self.first_live(group, num_blocks * BLOCK)
            held[group] += [NO_PAGE] * min(first, num_blocks) + pages[first:num_blocks]
            self._pools[group].reference(_live(held[group]))
        return num_blocks * BLOCK + self._reuse_partly(request, num_blocks)

    def _reuse_partly(self, request: LlmRequest, num_blocks: int) -> int:
        """Have the first tokens of the next block, if some are there; return how many."""
        end = min((num_blocks + 1) * BLOCK, request.prompt_len) - 1
        matches = self._matches(request, end, allow_partial=self.is_partial)
        sources = [match.partial_block_id for match in matches if match.num_partial_tokens]
        if len(sources) < len(matches) or self.get_num_free_blocks() < 2:
            return 0
        for group, source in enumerate(sources):
            self._held[request][group].append(self._own(group, source))
        return min(match.num_partial_tokens for match in matches)

    def _own(self, group: int, source: int) -> int:
        """Return a page of a request's own that holds what `source` does."""
        pool = self._pools[group]
        node = pool._nodes[source]
        pool.reference([source])
        if not self.has_groups and pool._references[source] == 1 and not node.children:
            pool._forget(node)
            return source
        page = self._take(group)
        self.memory.copy(group, source, page)
        self._release(group, [source])
        return page

    def _matches(self, request: LlmRequest, num_tokens: int, *, allow_partial: bool) -> list[Any]:
        """Return what each group's pool has of the first tokens."""
        digests: Any = [request.digest(position) for position in range(num_tokens)]
        return [
            pool.match(digests, namespace=None, allow_partial=allow_partial) for pool in self._pools
        ]

    def _remember(self, request: LlmRequest, held: list[list[int]], *, keep_tail: bool) -> None:
        """Let others find what is computed, as far as every block of it has a page somewhere."""
        computed = min(request.num_computed_tokens, len(request.get_tokens(0)) - 1)
        if request.num_hit and request.is_in_context:
            computed = 0  # nothing of it is sure to be there
        matches = self._matches(request, computed, allow_partial=False)
        for pool, pages, match in zip(self._pools, held, matches, strict=True):
            count, end = len(match.block_ids), computed // BLOCK
            while count < min(end, len(pages)) and pages[count] != NO_PAGE:
                count += 1
            is_whole = keep_tail and count == end < len(pages) and pages[end] != NO_PAGE
            digests = map(request.digest, range(computed if is_whole else count * BLOCK))
            pool.remember([*digests], pages, namespace=None, keep_tail=keep_tail)

    def _take(self, group: int) -> int:
        (page,) = self._pools[group].allocate(1)
        self._poison(group, [page])
        return page

    def _release(self, group: int, pages: Sequence[int]) -> None:
        self._poison(group, self._pools[group].release(_live(pages)))

    def _poison(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            self.memory.poison(group, page)


def _live(pages: Sequence[int]) -> list[int]:
    return [page for page in pages if page != NO_PAGE]
