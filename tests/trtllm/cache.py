"""The engine's own cache manager: who has which page, and prefixes that it reuses by itself."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import Memory
from tests.trtllm.shapes import BLOCK

NO_PAGE = -1


class Cache:
    """Pages of every layer group; the same on all ranks, as each rank counts for itself alike."""

    def __init__(
        self,
        memories: Sequence[Memory],
        windows: Sequence[int | None],
        *,
        num_pages: int,
        is_reused: bool = True,
        partial_tokens: int = 0,
    ) -> None:
        self.memories = memories
        self.windows = windows
        self.num_pages = num_pages
        self.is_reused = is_reused
        self.partial_tokens = partial_tokens
        self._free = [deque(range(num_pages)) for _ in windows]
        self._users = [Counter[int]() for _ in windows]
        self._tree: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._in_tree = [set[int]() for _ in windows]
        self._held: dict[int, list[list[int]]] = {}

    def pages_of(self, request: LlmRequest) -> list[list[int]]:
        """Return a request's pages, one list a layer group.

        Raises:
            KeyError: it has none (any more).
        """
        return self._held[request.request_id]

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._held

    def add(self, request: LlmRequest) -> int:
        """Open a sequence with what is reused of its prefix; return how many tokens that are."""
        held: list[list[int]] = [[] for _ in self.windows]
        self._held[request.request_id] = held
        if not self.is_reused:
            return 0
        blocks = self._match(request)
        for block in range(blocks):
            pages = self._tree[_key(request, block)]
            self._tree.move_to_end(_key(request, block))
            for group, page in enumerate(pages):
                is_live = block >= self.first_live(group, blocks * BLOCK)
                held[group].append(page if is_live else NO_PAGE)
                self._users[group][page] += is_live
        return blocks * BLOCK + self._reuse_partly(request, blocks)

    def extend(self, request: LlmRequest, num_tokens: int, *, history: int) -> None:
        """Have pages for the first `num_tokens` tokens; none for blocks that `history` is past."""
        for group, pages in enumerate(self.pages_of(request)):
            for block in range(len(pages), -(-num_tokens // BLOCK)):
                is_live = block >= self.first_live(group, history)
                pages.append(self._take(group) if is_live else NO_PAGE)

    def pass_windows(self, request: LlmRequest, history: int) -> None:
        """Give back pages that no window reaches any more; their places stay."""
        for group, pages in enumerate(self.pages_of(request)):
            for block in range(min(len(pages), self.first_live(group, history))):
                if pages[block] != NO_PAGE:
                    self._drop(group, pages[block])
                    pages[block] = NO_PAGE

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """Give back the pages behind the first `num_tokens` tokens, but none of the prompt's."""
        kept = -(-max(num_tokens, request.orig_prompt_len) // BLOCK)
        for group, pages in enumerate(self.pages_of(request)):
            while len(pages) > kept:
                self._drop(group, pages.pop())

    def free(self, request: LlmRequest, *, computed: int) -> None:
        """End a sequence, and keep what it computed for others. Twice is fine."""
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        if self.is_reused:
            for block in range(min(computed // BLOCK, *map(len, held))):
                pages = tuple(group[block] for group in held)
                key = _key(request, block)
                if key not in self._tree and NO_PAGE not in pages:
                    self._tree[key] = pages
                    for group, page in enumerate(pages):
                        self._in_tree[group].add(page)
        for group, pages in enumerate(held):
            for page in pages:
                if page != NO_PAGE:
                    self._drop(group, page)

    def _match(self, request: LlmRequest) -> int:
        run = 0
        while run < (request.prompt_len - 1) // BLOCK and _key(request, run) in self._tree:
            run += 1
        return run

    def _reuse_partly(self, request: LlmRequest, blocks: int) -> int:
        """Have a copy of some tokens of the next block; return how many."""
        if not 0 < self.partial_tokens < request.prompt_len - blocks * BLOCK:
            return 0
        start = blocks * BLOCK
        for group, pages in enumerate(self.pages_of(request)):
            pages.append(self._take(group))
            for memory in self.memories:
                end = start + self.partial_tokens
                memory.compute(request, group, blocks, pages[blocks], start, end)
        return self.partial_tokens

    def first_live(self, group: int, history: int) -> int:
        """Return the first block that the next token still looks back to."""
        window = self.windows[group]
        return 0 if window is None else max(0, (history - window + 1) // BLOCK)

    def _take(self, group: int) -> int:
        if not self._free[group]:
            self._evict()
        page = self._free[group].popleft()
        self._users[group][page] = 1
        for memory in self.memories:
            memory.poison(group, page)
        return page

    def _drop(self, group: int, page: int) -> None:
        self._users[group][page] -= 1
        if not self._users[group][page] and page not in self._in_tree[group]:
            self._put_back(group, page)

    def _evict(self) -> None:
        """Give back the block of the tree that nobody has used for longest."""
        for key, pages in self._tree.items():
            if not any(self._users[group][page] for group, page in enumerate(pages)):
                del self._tree[key]
                for group, page in enumerate(pages):
                    self._in_tree[group].discard(page)
                    self._put_back(group, page)
                return
        raise AssertionError("the stand-in admitted more than it has pages for")

    def _put_back(self, group: int, page: int) -> None:
        self._free[group].append(page)
        for memory in self.memories:
            memory.poison(group, page)


def _key(request: LlmRequest, block: int) -> bytes:
    return request.digest((block + 1) * BLOCK - 1)
