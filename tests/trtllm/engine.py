"""One version's engine around a connector: the reference engine's executor, over a model of bytes.

Prompts, pages and metadata are real; keys and values are functions of the tokens.
"""

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvray.reference.engine_options import EngineOptions
from kvray.reference.executor import Executor
from kvray.reference.request import LlmRequestState, ScheduledRequests
from tests.trtllm.cache import DUMMY_ID, Cache
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, FLAT, Memory, Shape
from tests.trtllm.model import Model
from tests.trtllm.version import Version
from tests.unit.actors.small_shard import WAIT_S

OWNERS = 2
"""Under attention data parallelism, of which an engine here is one."""
WARM_UP_LAYERS = 2


class AllRanks:
    """The workers of all ranks as one; what rank 0 has is pickled for the others, as MPI does."""

    def __init__(
        self, workers: Sequence[Any], happen: Callable[[str], None], *, num_loads: int
    ) -> None:
        """`num_loads`: how often the engine starts the loads of one pass; again is a repetition."""
        self.workers = workers
        self.sent: list[tuple[int, Any]] = []
        """Metadata of each pass, and how many bytes of it there are."""
        self._happen = happen
        self._num_loads = num_loads
        self._handed: list[set[int]] = [set() for _ in workers]
        self._ended: list[set[int]] = [set() for _ in workers]

    def bind_connector_meta(self, metadata: Any) -> None:
        packed = pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)
        self.sent.append((len(packed), metadata))
        for rank, worker in enumerate(self.workers):
            received = pickle.loads(packed) if rank else metadata  # noqa: S301 - as MPI does
            worker.bind_connector_meta(received)

    def start_load_kv(self, stream: Any) -> None:
        for _ in range(self._num_loads):
            for worker in self.workers:
                worker.start_load_kv(stream)
        self._happen("loaded")

    def wait_for_save(self, stream: Any) -> None:
        for worker in self.workers:
            worker.wait_for_save(stream)
        self._happen("passed")

    def get_finished(self, ids: list[int], _loading: list[int]) -> tuple[list[int], list[int]]:
        """Return what every rank has saved; an id that a rank was not given ends the engine."""
        self._happen("ended")
        for worker, handed, ended in zip(self.workers, self._handed, self._ended, strict=True):
            handed.update(ids)
            saved, loaded = worker.get_finished(list(ids), [])
            for request_id in saved:
                handed.remove(request_id)
            assert not loaded, "kvray loads before the pass"
            ended.update(saved)
        everywhere = set.intersection(*self._ended)
        for ended in self._ended:
            ended.difference_update(everywhere)
        return sorted(everywhere), []


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
        memories = [
            Memory(
                shape, rank=rank if owner is None else 0, num_ranks=num_ranks, num_pages=num_pages
            )
            for rank in ranks
        ]
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
        for worker, memory in zip(self.workers, memories, strict=True):
            warm_up(worker)
            if has_groups:
                worker.register_kv_cache_layout(memory.layout(version))
            else:
                worker.register_kv_caches(memory.pool())
        self.ranks = AllRanks(self.workers, self._happen, num_loads=2 if has_groups else 1)
        self.manager = version.manager(
            self.ranks, self.scheduler, owner=owner, is_flat=not has_groups
        )
        self.cache = Cache(
            memories,
            [group.window for group in shape.groups],
            num_pages=num_pages,
            has_groups=has_groups,
            resolves_late=version.resolves_late and has_groups,
            is_reused=(cache or {}).get("enable_block_reuse", True),
            is_partial=(cache or {}).get("enable_partial_reuse", False),
            draft_len=draft_len,
        )
        self.cache.connector, self.cache.asked = self.manager, self._begin
        self.model = Model(
            self.workers, memories, self.cache, has_hooks=has_hooks, has_groups=has_groups
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
        while (
            self.executor.active
            or self.executor._previous
            or self.manager.is_saving
            or self.cache.sending
        ):
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
        for memory in self.model.memories:
            memory.fill_as_expected()
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
        return (
            not request.is_ended
            or request.request_id in self.manager.unfinished_ids()
            or (previous is not None and request in previous[0].all_requests())
        )

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
