"""One version's engine around a connector: its order of calls, and a model that checks its reads.

A token is sampled from all tokens before it, so an answer is right if it is that of a new request
without a cache; whether it was computed from right keys and values is checked row by row.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

from tests.trtllm.cache import Cache
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import Memory
from tests.trtllm.shapes import BLOCK, FLAT, Shape
from tests.trtllm.version import Version
from tests.unit.actors.small_shard import WAIT_S

DUMMY_ID = 2**64 - 1

Honour = Callable[[LlmRequest, int], int]
"""From a request and an offer in tokens to how much of it is taken."""


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
        partial_tokens: int = 0,
        cache: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        self.version = version
        self.stand_in = stand_in = version.stand_in
        self.has_groups = stand_in.HAS_GROUPS and not is_flat
        """Whether the second cache manager is in use, which describes layer groups."""
        self.chunk = chunk
        self.is_overlapped = is_overlapped
        self.has_hooks = has_hooks
        self.max_batch = max_batch
        self.honour: Honour = lambda _request, offer: offer
        self.defers: Callable[[LlmRequest], bool] = lambda _request: False
        """Whether a request that was asked about is left out of the batch (`RESOLVES_LATE`)."""
        self.at: dict[str, Callable[[Engine], None]] = {}
        """What happens at a point of every iteration: asked, planned, loaded, passed, ended."""
        ranks = range(num_ranks) if owner is None else [owner]
        self.memories = [
            Memory(shape, rank=rank if owner is None else 0, num_pages=num_pages) for rank in ranks
        ]
        cache_args = {"tokens_per_block": BLOCK, "enable_block_reuse": True, **(cache or {})}
        self.workers, self.manager = [], None
        for rank in ranks:
            with version.rank(rank):
                llm_args = stand_in.llm_args(
                    num_ranks=num_ranks if owner is None else 2,
                    rank=rank,
                    cache=cache_args,
                    **args | ({} if owner is None else {"enable_attention_dp": True}),
                )
                self.workers.append(version.worker_class(llm_args))
                if rank == ranks[0]:
                    self.scheduler = version.scheduler_class(llm_args)
        self._warm_up()
        for worker, memory in zip(self.workers, self.memories, strict=True):
            if self.has_groups:
                worker.register_kv_cache_layout(memory.layout(stand_in))
            else:
                worker.register_kv_caches(memory.pool())
        named = {} if owner is None else {"owner": owner}
        named |= {"is_flat": True} if is_flat and stand_in.HAS_GROUPS else {}
        self.manager = stand_in.Manager(self.workers, self.scheduler, **named)
        self.cache = Cache(
            self.memories,
            [group.window for group in shape.groups],
            num_pages=num_pages,
            is_reused=bool(cache_args["enable_block_reuse"]),
            partial_tokens=partial_tokens,
        )
        self.waiting: list[LlmRequest] = []
        self.active: list[LlmRequest] = []
        self.pinned: list[LlmRequest] = []
        self.corrupt_rows = 0
        self.num_passes = 0
        self.drops_batch = False
        """Whether the coming batch is loaded for, and then put off."""
        self.num_polls = 0
        self.failure: BaseException | None = None
        """What the connector ended this engine with."""
        self._layers = sorted(layer for group in shape.groups for layer in group.layers)
        self._previous: list[LlmRequest] = []
        self._ids = itertools.count(1)
        self._dummy: LlmRequest | None = None

    def submit(self, tokens: list[int], *, max_new: int = 1, **fields: Any) -> LlmRequest:
        request = LlmRequest(
            next(self._ids),
            tokens,
            known=self.stand_in.REQUEST_FIELDS,
            max_new_tokens=max_new,
            **fields,
        )
        self.waiting.append(request)
        return request

    def serve(self, tokens: list[int], *, max_new: int = 1, **fields: Any) -> LlmRequest:
        """Run one request to its end; `num_hit` says how many tokens were loaded for it."""
        request = self.submit(tokens, max_new=max_new, **fields)
        self.run()
        return request

    def run(self) -> None:
        """Run until there is nothing left to do."""
        deadline = time.monotonic() + WAIT_S
        while self.waiting or self.active or self._previous or self.pinned:
            before = self.num_passes
            self.step()
            if self.num_passes == before:  # all are parked
                assert time.monotonic() < deadline, "the engine does not come to an end"
                time.sleep(0.0005)

    def step(self) -> None:
        """Do one iteration; whatever the connector raises is the engine's end."""
        try:
            self._iterate()
        except Exception as error:
            self.failure = error
            raise

    def _iterate(self) -> None:
        context, generation = self._schedule()
        if context or generation:
            self._prepare(context)
            self._happen("asked")
            context, generation = self._living(context), self._living(generation)
            self.manager.build_scheduler_output(context, generation, self.cache)
            self._happen("planned")
            context = self.manager.begin_pass(context)
            self._expect_loads(context)
            self._happen("loaded")
            context, generation = self._living(context), self._living(generation)
        elif self.has_groups:
            self.manager.begin_pass([])  # what is bound stays bound
        if self.drops_batch:
            context, generation, self.drops_batch = [], [], False
        batch = [*context, *generation]
        if batch:
            self._forward(context, generation)
        self._happen("passed")
        done = self._previous if self.is_overlapped else batch
        if self.is_overlapped:
            self._previous = batch
        self._end(done)
        self._happen("ended")
        self.num_polls += 1
        for request in self.manager.get_finished():
            self.pinned.remove(request)
            self._let_go(request)

    def poll(self) -> None:
        """Do an iteration of an engine that has nothing to do."""
        assert not self.active
        self.step()

    def poll_parked(self, request: LlmRequest) -> bool:
        """Ask what has ended; return whether a parked request may go on."""
        self.manager.get_finished()
        return not request.is_parked

    def kill(self, request: LlmRequest) -> None:
        """Cancel a request the way of versions that tell nobody: its pages go at once."""
        self._hand_back(request)
        self._let_go(request)
        request.is_ended = True

    def preempt(self, request: LlmRequest) -> None:
        """Take a request's pages away and have it begin anew."""
        self._hand_back(request)
        self._let_go(request)
        if self.stand_in.RESOLVES_LATE:
            self.manager.reset(request)
        request.restart()
        self.waiting.insert(0, request)

    def overtake(self, request: LlmRequest, end: int) -> None:
        """Have the engine come by the first `end` tokens of a late request in another way."""
        start, offered, is_async = request.offer
        self.cache.extend(request, end, history=0)
        self._each_page(request, 0, end, "expect")
        for memory in self.memories:
            memory.take_as_wanted()
        self.manager.cancel_load(request, start, end)
        request.offer = (end, offered, is_async)

    def add_dummy(self) -> None:
        """Pad every generation batch with a request that nobody has asked for."""
        self._dummy = LlmRequest(
            DUMMY_ID,
            [0],
            known=self.stand_in.REQUEST_FIELDS,
            max_new_tokens=10**6,
            is_dummy_request=True,
        )
        self.cache.add(self._dummy)
        self.cache.extend(self._dummy, 1, history=0)
        self._dummy.state = "GENERATION_IN_PROGRESS"

    def close(self) -> None:
        """Let go of the tier; what is saved is flushed. Twice is fine."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    @property
    def totals(self) -> Any:
        return self.workers[0]._engine.totals

    @property
    def arena(self) -> Any:
        return self.workers[0]._engine.link.arena

    def _warm_up(self) -> None:
        """Do what engines do before there is a pool: passes, without anything bound."""
        for worker in self.workers:
            after_pass = worker.register_forward_pass_callable()
            for layer in range(2):
                worker.wait_for_layer_load(layer, None)
                worker.save_kv_layer(layer, None)
            if after_pass is not None:
                after_pass()
            worker.start_load_kv(None)
            worker.wait_for_save(None)
            assert worker.get_finished([], []) == ([], [])

    def _happen(self, point: str) -> None:
        if point in self.at:
            self.at[point](self)

    def _living(self, requests: list[LlmRequest]) -> list[LlmRequest]:
        return [one for one in requests if one in self.active or one is self._dummy]

    def _schedule(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        while self.waiting and len(self.active) < self.max_batch and self._fits(self.waiting[0]):
            self.active.append(self.waiting.pop(0))
        context = [one for one in self.active if one.state == "CONTEXT_INIT"]
        generation = [one for one in self.active if one.is_generating]
        if self.stand_in.RESOLVES_LATE:
            context = [one for one in context if self._ask_ahead(one)]
        for request in context:
            left = request.prompt_len - request.context_current_position
            request.context_chunk_size = min(left, self.chunk or left)
        if generation and self._dummy is not None:
            generation.append(self._dummy)
        return context, generation

    def _fits(self, request: LlmRequest) -> bool:
        """Whether all that are active could run to their ends beside it, sharing nothing."""
        everyone = [*self.active, *self.pinned, request]
        return sum(_blocks_max(one) for one in everyone) <= self.cache.num_pages - 1

    def _ask_ahead(self, request: LlmRequest) -> bool:
        """Ask once, and perhaps leave the request out; what was offered waits meanwhile."""
        if request.has_pages:
            return True
        if request.offer is None and self._is_asked_about(request):
            local = self._open(request)
            count, is_async = self.manager.query(request, local)
            request.offer = (local, local + count, is_async)
        return not self.defers(request)

    def _prepare(self, context: list[LlmRequest]) -> None:
        """Give first chunks their pages, and ask what can be loaded into them."""
        for request in context:
            if not request.has_pages and self.manager.should_add_sequence(request):
                self._add(request)
            elif self.has_groups:
                start = request.context_current_position
                end = start + request.context_chunk_size
                self.cache.extend(request, end, history=start)
        for request in self.active:
            if request.is_generating:
                position = len(request.tokens) - 1
                self.cache.extend(request, position + 1, history=position)

    def _add(self, request: LlmRequest) -> None:
        manager = self.manager
        if not self.has_groups:
            local = self._open(request)
            self.cache.extend(request, request.prompt_len, history=0)
            taken = manager.get_num_new_matched_tokens(request, local)
            if not self.cache.is_reused:
                taken = 0  # asked, and then not heard
        else:
            taken = 0
            if request.offer is not None:
                local, end, is_async = request.offer
            else:
                local = self._open(request)
                is_asked = self._is_asked_about(request)
                count, is_async = manager.query(request, local) if is_asked else (0, False)
                end = local + count
            if end > local or self._is_asked_about(request):
                taken = self.honour(request, end - local) if self.cache.is_reused else 0
                if self.stand_in.RESOLVES_LATE and taken < end - local:
                    manager.cancel_load(request, local + taken, end)
                manager.commit(request, taken, is_async)
            request.offer = (local, end, is_async)
        assert local + taken < request.prompt_len, "at least one token is computed"
        request.context_current_position = local + taken
        left = request.prompt_len - local - taken
        request.context_chunk_size = min(left, self.chunk or left)
        if self.has_groups:
            end = local + taken + request.context_chunk_size
            self.cache.extend(request, end, history=local + taken)
        request.has_pages, request.num_hit = True, taken
        manager.update_state_after_alloc(request, self.cache.pages_of(request))

    def _open(self, request: LlmRequest) -> int:
        if request.request_id in self.cache:
            return request.context_current_position
        request.context_current_position = self.cache.add(request)
        return request.context_current_position

    def _is_asked_about(self, request: LlmRequest) -> bool:
        return not request.is_generation_only_request

    def _expect_loads(self, context: list[LlmRequest]) -> None:
        """Check that what was promised to first chunks is there, and nothing else has changed."""
        for request in context:
            if request.num_hit and request.state == "CONTEXT_INIT":
                end = request.context_current_position
                self._each_page(request, (end - request.num_hit) // BLOCK, end, "expect")
        self._check()

    def _forward(self, context: list[LlmRequest], generation: list[LlmRequest]) -> None:
        self.num_passes += 1
        layers = self._layers if self.has_hooks and context else ()
        for layer, worker in itertools.product(layers, self.workers):
            worker.wait_for_layer_load(layer, None)
        for request in context:
            start = request.context_current_position
            self._compute(request, start, start + request.context_chunk_size)
        for request in generation:
            if request is not self._dummy:
                self._compute(request, len(request.tokens) - 1, len(request.tokens))
        for layer, worker in itertools.product(layers, self.workers):
            worker.save_kv_layer(layer, None)
        for worker in self.workers:
            worker.wait_for_save(None)
        self._check()
        for request in context:
            request.context_current_position += request.context_chunk_size
            if request.context_current_position == request.prompt_len:
                request.state = "GENERATION_IN_PROGRESS"
        for request in (*context, *generation):
            if request is self._dummy:
                continue
            if self.has_groups:
                is_last = request.is_generating
                done = len(request.tokens) if is_last else request.context_current_position
                self.cache.pass_windows(request, done)
            if request.is_generating:
                request.sample()

    def _compute(self, request: LlmRequest, start: int, end: int) -> None:
        """Read all that the tokens from `start` to `end` attend to, and write them."""
        for memory in self.memories:
            for group, pages in enumerate(self.cache.pages_of(request)):
                first = self.cache.first_live(group, start)
                for block in range(first, -(-start // BLOCK)):
                    self.corrupt_rows += memory.corrupt_rows(
                        request, group, block, pages[block], start
                    )
                for block in range(start // BLOCK, -(-end // BLOCK)):
                    memory.compute(request, group, block, pages[block], start, end)

    def _end(self, batch: list[LlmRequest]) -> None:
        """Read what was sampled for `batch`, and end what has come to an end."""
        for request in batch:
            if request is self._dummy or not request.is_generating:
                continue
            if not request.is_ended:
                request.num_read += 1
                is_last = len(request.answer) >= request.max_new_tokens
                request.is_ended = is_last or request.answer[-1] % 16 == 0  # an early end
            if request.is_ended and request.request_id in self.cache:
                pages = self.cache.pages_of(request)
                if self.manager.request_finished(request, pages):
                    self.pinned.append(request)
        for request in batch:
            if request.is_ended and request.is_generating and request not in self.pinned:
                if self.is_overlapped:
                    # The request was in the next batch, too, which knew nothing of its end.
                    self.manager.request_finished(request, [[] for _ in self.cache.windows])
                self._let_go(request)

    def _hand_back(self, request: LlmRequest) -> None:
        if request.offer is None or request.request_id in self.manager.seen or request.is_parked:
            return
        start, end, _ = request.offer
        if self.stand_in.RESOLVES_LATE and end > start:
            self.manager.cancel_load(request, start, end)

    def _let_go(self, request: LlmRequest) -> None:
        computed = request.context_current_position
        if request.is_generating:
            computed = max(computed, request.num_read - 1)
        if request.is_parked or (request.num_hit and not request.is_generating):
            computed = 0  # nothing of it is sure to be there
        self.cache.free(request, computed=computed)
        for requests in (self.active, self.waiting, self._previous):
            if request in requests:
                requests.remove(request)
        if self.has_groups:
            self.manager.forget(request)

    def _each_page(self, request: LlmRequest, first: int, end: int, action: str) -> None:
        for memory in self.memories:
            for group, pages in enumerate(self.cache.pages_of(request)):
                live = max(first, self.cache.first_live(group, end))
                for block in range(live, -(-end // BLOCK)):
                    getattr(memory, action)(request, group, block, pages[block], end)

    def _check(self) -> None:
        self.corrupt_rows += sum(memory.stray_rows() for memory in self.memories)


def _blocks_max(request: LlmRequest) -> int:
    return -(-(request.prompt_len + request.max_new_tokens + 1) // BLOCK)
