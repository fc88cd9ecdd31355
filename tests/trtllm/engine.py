"""One version's engine around a connector: the reference engine's executor, over a model of bytes.

Prompts, pages and metadata are real; keys and values are functions of the tokens.
"""

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvray.reference.engine_options import EngineOptions
from kvray.reference.executor import Executor
from kvray.reference.request import LlmRequestState, ScheduledRequests
from tests.trtllm.cache import DUMMY_ID, Cache
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, FLAT, Memory, Shape
from tests.trtllm.version import Version
from tests.unit.actors.small_shard import WAIT_S

OWNERS = 2
"""Under attention data parallelism, of which an engine here is one."""
WARM_UP_LAYERS = 2


class AllRanks:
    """The workers of all ranks as one; what rank 0 has is pickled for the others, as MPI does."""

    def __init__(
        self, workers: list[Any], happen: Callable[[str], None], *, num_loads: int
    ) -> None:
        """`num_loads`: how often the engine starts the loads of one pass; again is a repetition."""
        self.workers = workers
        self.sent: list[int] = []
        """How many bytes of metadata each pass had."""
        self._happen = happen
        self._num_loads = num_loads

    def bind_connector_meta(self, metadata: Any) -> None:
        packed = pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)
        self.sent.append(len(packed))
        for rank, worker in enumerate(self.workers):
            received = pickle.loads(packed) if rank else metadata  # noqa: S301 - as MPI does
            worker.bind_connector_meta(received)

    def start_load_kv(self, stream: Any) -> None:
        for worker in self.workers * self._num_loads:
            worker.start_load_kv(stream)
        self._happen("loaded")

    def wait_for_save(self, stream: Any) -> None:
        for worker in self.workers:
            worker.wait_for_save(stream)
        self._happen("passed")

    def get_finished(self, ids: list[int], _loading: list[int]) -> tuple[list[int], list[int]]:
        """Poll all ranks: kvray has no blocks kept, so there is nothing to hand in or to return."""
        self._happen("ended")
        for worker in self.workers:
            assert worker.get_finished(ids, []) == ([], [])
        return [], []


class Engine:
    """Runs requests to their end on the caller's thread, one iteration at a time."""

    def __init__(
        self,
        version: Version,
        *,
        shape: Shape = FLAT,
        num_pages: int = 128,
        num_ranks: int = 1,
        owner: int | None = None,
        is_flat: bool = False,
        chunk: int | None = None,
        is_overlapped: bool = False,
        has_hooks: bool = True,
        max_batch: int = 4,
        draft_len: int = 0,
        cache: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        """Start the engine; `is_flat`: with the first cache manager, where there is a choice."""
        self.version = version
        has_groups = version.has_groups and not is_flat
        self.at: dict[str, Callable[[Engine], None]] = {}
        """Called at a point of an iteration: asked, loaded, passed or ended."""
        self.drops_batch = False
        """Whether the coming batch is loaded for, and then put off."""
        self.failure: BaseException | None = None
        """The error of the connector that ended this engine."""
        self._ids = itertools.count(1)
        self._batch = ScheduledRequests()
        ranks = range(num_ranks) if owner is None else [owner]
        memory = Memory(
            shape, ranks if owner is None else [0], num_ranks=num_ranks, num_pages=num_pages
        )
        if draft_len:
            args["speculative_config"] = SimpleNamespace(
                decoding_type="NGram", max_draft_len=draft_len
            )
        if any(group.window is not None for group in shape.groups):  # not the default
            cache = {"block_reuse_config": SimpleNamespace(policy="per_request")} | (cache or {})
        self.workers, self.scheduler = version.construct(
            ranks,
            num_ranks=num_ranks if owner is None else OWNERS,
            cache=cache or {},
            **args | ({} if owner is None else {"enable_attention_dp": True}),
        )
        for at, worker in enumerate(self.workers):
            warm_up(worker)
            if has_groups:
                worker.register_kv_cache_layout(memory.layout(version, at))
            else:
                worker.register_kv_caches(memory.pool(at))
        self.ranks = AllRanks(self.workers, self._happen, num_loads=2 if has_groups else 1)
        self.manager = version.manager(
            self.ranks, self.scheduler, owner=owner, is_flat=not has_groups
        )
        self.cache = Cache(
            memory=memory,
            windows=[group.window for group in shape.groups],
            num_pages=num_pages,
            has_groups=has_groups,
            resolves_late=version.resolves_late and has_groups,
            is_reused=(cache or {}).get("enable_block_reuse", True),
            is_partial=(cache or {}).get("enable_partial_reuse", False),
            draft_len=draft_len,
        )
        self.cache.connector, self.cache.asked = self.manager, self._begin
        self.model = Model(
            workers=self.workers,
            memory=memory,
            cache=self.cache,
            has_hooks=has_hooks,
            has_groups=has_groups,
        )
        options = EngineOptions(
            tokens_per_block=BLOCK,
            enable_chunked_prefill=chunk is not None,
            chunk_tokens=chunk,
            overlap=is_overlapped,
            max_draft_len=draft_len,
            max_batch_size=max_batch,
            runtime="main" if has_groups else "1.2",
        )
        intake = SimpleNamespace(pause=_nothing, progress=_nothing, end=_raise)
        self.executor = Executor(self.model, self.cache, intake, options, self.manager)

    def submit(
        self, tokens: list[int], *, max_new: int = 1, request_id: int | None = None, **fields: Any
    ) -> LlmRequest:
        """Take a request in, under an id of its own or one that an ended request had."""
        request = self._request(
            next(self._ids) if request_id is None else request_id, tokens, max_new, **fields
        )
        self.executor.active.append(request)
        return request

    def serve(self, tokens: list[int], *, max_new: int = 1, **fields: Any) -> LlmRequest:
        """Run one request to its end; `num_hit` says how many tokens were loaded for it."""
        request = self.submit(tokens, max_new=max_new, **fields)
        self.run()
        return request

    def run(self) -> None:
        """Run until there is nothing left to do."""
        deadline = time.monotonic() + WAIT_S
        while self.executor.active or self.executor._previous or self.cache.sending:
            before = self.model.num_passes
            self.step()
            if self.model.num_passes == before:
                assert time.monotonic() < deadline, "the engine does not come to an end"
                time.sleep(0.0005)

    def step(self) -> None:
        """Do one iteration; whatever the connector raises is the engine's end."""
        self._batch = ScheduledRequests()
        try:
            self.executor.iterate()
        except Exception as error:
            self.failure = error
            raise
        self._send()

    def kill(self, request: LlmRequest) -> None:
        """Cancel a request the way of versions that tell nobody: its pages go at once."""
        self._take_out(request)
        request.finish_by_reason("cancelled")

    def preempt(self, request: LlmRequest) -> None:
        """Take a request's pages away and have it start over."""
        self._take_out(request)
        self.manager.replay(request)
        request.restart()
        self.executor.active.append(request)

    def overtake(self, request: LlmRequest, end: int) -> None:
        """Have the engine come by the first `end` tokens of a late request in another way."""
        start, offered = request.offer
        self.cache.extend(request, end, history=0)
        self.model.expect(request, 0, end)
        self.model.memory.fill_as_expected()
        self.manager.cancel_load(request, start, end)
        request.offer = (end, offered)

    def add_dummy(self) -> None:
        """Pad every generation batch with a request that nobody has asked for.

        Under attention data parallelism an owner's dummies are nobody's business.
        """
        self.cache.dummy = dummy = self._request(DUMMY_ID, [0], 10**6)
        dummy.state = LlmRequestState.GENERATION_IN_PROGRESS
        dummy.is_dummy = self.manager.is_owner

    def is_busy(self, request: LlmRequest) -> bool:
        """Whether the engine still does something in a request's name."""
        previous = self.executor._previous
        is_sampled = previous is not None and request in previous[0].all_requests()
        return is_sampled or not request.is_finished

    def finish(self) -> None:
        """Do all that there is to do, and end."""
        self.run()
        self.close()

    def close(self) -> None:
        """Let go of the tier; what is saved is flushed. Twice is fine."""
        for half in (self.scheduler, *self.workers):
            half.shutdown()

    @property
    def totals(self) -> Any:
        return self.workers[0]._rank.shared.figures.totals

    @property
    def arena(self) -> Any:
        return self.workers[0]._rank.shared.link.arena

    def _request(
        self, request_id: int, tokens: list[int], max_new: int, **fields: Any
    ) -> LlmRequest:
        known = self.version.request_fields
        return LlmRequest(request_id, tokens, known=known, max_new_tokens=max_new, **fields)

    def _begin(self, batch: ScheduledRequests) -> None:
        self._batch = batch
        self._happen("asked")

    def _happen(self, point: str) -> None:
        """Do at a point of the iteration what a test has asked for."""
        if point == "loaded":
            self.model.expect_loads(self._batch)
        elif point == "passed":
            self.model.end_pass()
        if point in self.at:
            self.at[point](self)
        if point == "loaded" and self._batch.batch_size and self.drops_batch:
            self._batch.context_requests.clear()
            self._batch.generation_requests.clear()
            self.drops_batch = False

    def _take_out(self, request: LlmRequest) -> None:
        """Free a request, and have the batches and the connector's late offers know nothing of it.

        The connector is not told that it has ended.
        """
        if request.offer is not None and not request.was_reported:
            self.manager.cancel_load(request, *request.offer)
        self.cache.free_resources(request)
        lists = [self.executor.active]
        previous = () if self.executor._previous is None else self.executor._previous[:1]
        for batch in (self._batch, *previous):
            lists += [batch.context_requests, batch.generation_requests]
        for requests in lists:
            if request in requests:
                requests.remove(request)

    def _send(self) -> None:
        """Send blocks of prompts for one iteration more, and look at what has arrived."""
        for request in list(self.cache.sending):
            self.cache.sending[request] -= 1
            if not self.cache.sending[request]:
                self.model.read(request, request.prompt_len)
                self.cache.free_resources(request)
                del self.cache.sending[request]


@dataclass(kw_only=True)
class Model:
    """All its ranks; `corrupt_rows` counts what was read wrongly, or written where it must not."""

    workers: Sequence[Any]
    memory: Memory
    cache: Cache
    has_hooks: bool
    has_groups: bool
    corrupt_rows: int = 0
    num_accepted: int = 0
    """Drafted tokens that turned out to be those of the answer."""
    num_passes: int = 0
    stream: None = None
    _computed: dict[LlmRequest, int] = field(default_factory=dict)
    """How many tokens of each request the pass has left behind, until its end."""

    def expect_loads(self, batch: ScheduledRequests) -> None:
        """Check that what was promised to first chunks is there, and nothing else has changed.

        Blocks are loaded whole: the engine may count on only the first tokens of the last one.
        """
        for request in batch.context_requests:
            if request.num_hit:
                end = request.context_current_position
                first, stop = (end - request.num_hit) // BLOCK, -(-end // BLOCK)
                self.expect(request, first, stop * BLOCK)
        self.check()

    def forward(self, batch: ScheduledRequests, _pending: Mapping[int, int]) -> dict[int, int]:
        """Compute a pass with the hooks in it; return the next token of each request that has one.

        A dummy computes nothing that anybody reads.
        """
        self.num_passes += 1
        groups = self.memory.shape.groups if self.has_hooks and batch.context_requests else ()
        layers = sorted(layer for group in groups for layer in group.layers)
        for layer, worker in itertools.product(layers, self.workers):
            worker.wait_for_layer_load(layer, None)
        self._computed = {}
        sampled = {}
        for request in batch.context_requests:
            end = request.context_current_position + request.context_chunk_size
            self._compute(request, request.context_current_position, end)
            if end == request.prompt_len:
                sampled[request.request_id] = request.token_at(end)
        for request in batch.generation_requests:
            if request.request_id != DUMMY_ID:
                sampled[request.request_id] = self._generate(request)
        for layer, worker in itertools.product(layers, self.workers):
            worker.save_kv_layer(layer, None)
        return sampled

    def end_pass(self) -> None:
        """Check all pages once the saves have read them, and give back what windows have passed."""
        self.check()
        for request, end in self._computed.items():
            if self.has_groups:
                self.cache.pass_windows(request, end)
                self.cache.replace_pages(request)
        self._computed = {}

    def read(self, request: LlmRequest, end: int) -> None:
        """Read all that a token at `end` attends to."""
        for place in self._places(request, 0, end, history=end):
            self.corrupt_rows += self.memory.corrupt_rows(request, *place, end)

    def expect(self, request: LlmRequest, first: int, end: int) -> None:
        """Note that a request's pages should hold the blocks from `first` to token `end`."""
        for place in self._places(request, first, end, history=end):
            self.memory.expect(request, *place, end)

    def check(self) -> None:
        self.corrupt_rows += self.memory.stray_rows()

    def _compute(self, request: LlmRequest, start: int, end: int) -> None:
        """Read all that the tokens from `start` to `end` attend to, and write them.

        What attends to wrong rows is as wrong.
        """
        known = self.corrupt_rows
        self.read(request, start)
        for place in self._places(request, start // BLOCK, end, history=start):
            self.memory.compute(request, *place, start, end)
        if self.corrupt_rows > known:
            self._scribble(request, start, end)
        self._computed[request] = end

    def _generate(self, request: LlmRequest) -> int:
        """Compute the newest token and its drafts, and return what follows the right ones."""
        newest, drafts = request.num_computed_tokens, request.py_draft_tokens
        self._compute(request, newest, newest + 1)
        end = newest + 1
        while end - newest <= len(drafts) and drafts[end - newest - 1] == request.token_at(end):
            self._compute(request, end, end + 1)
            end += 1
        request.py_num_accepted_draft_tokens = end - newest - 1
        self.num_accepted += end - newest - 1
        self._scribble(request, end, newest + 1 + len(drafts))  # what rejected tokens leave behind
        return request.token_at(end)

    def _scribble(self, request: LlmRequest, start: int, end: int) -> None:
        """Write rows that belong to no token in the places of those from `start` to `end`."""
        for position in range(start, end):
            block, row = divmod(position, BLOCK)
            for group, _, page in self._places(request, block, position + 1, history=0):
                self.memory.scribble(group, page, row)

    def _places(
        self, request: LlmRequest, first: int, end: int, *, history: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (group, block, page) of a request's blocks from `first` to token `end`.

        Without those that the windows of a token at `history` do not reach.
        """
        for group, pages in enumerate(self.cache.pages_of(request)):
            live = max(first, self.cache.first_live(group, history))
            for block in range(live, -(-end // BLOCK)):
                yield group, block, pages[block]


def warm_up(worker: Any) -> None:
    """Do what engines do before there is a pool: passes, without anything bound."""
    after_pass = worker.register_forward_pass_callable()
    for layer in range(WARM_UP_LAYERS):
        worker.wait_for_layer_load(layer, None)
        worker.save_kv_layer(layer, None)
    if after_pass is not None:
        after_pass()
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    assert worker.get_finished([], []) == ([], [])


def _nothing(*_: Any) -> None:
    return


def _raise(_request: LlmRequest, error: BaseException | None) -> None:
    """An error in a pass fails all its requests; here it is a test's, as any other."""
    if error is not None:
        raise error.__cause__ or error
