"""Pages of a running request that its manager gives to others, which no report shows.

The second manager puts equal pages of others in the place of those that a request has computed; the
first one, with one window, lets front blocks go. Blocks that are saved later would have bytes of
others, with checksums that are right.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvray.engine.engine_args import MediaTokens
from kvray.node import NodeLink
from kvray.store import Arena
from tests.trtllm.cache import Cache
from tests.trtllm.conftest import PROMPT
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, NO_PAGE, GroupShape, Shape
from tests.trtllm.version import WITH_GROUPS, on
from tests.waiting import Gate, wait_for

LONG = list(range(300, 400))
"""A prompt that gets pages which have gone."""
WINDOW = 8
ONE_WINDOW: dict[str, Any] = {
    "shape": Shape(name="one-window", groups=(GroupShape(layers=(0, 1), window=WINDOW),)),
    "is_flat": True,
    "cache": {"max_attention_window": [WINDOW]},
}


@pytest.fixture
def tier_comes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set engines see no tier."""
    comes, arena = threading.Event(), NodeLink.arena.fget
    assert arena is not None
    found = property(lambda link: arena(link) if comes.is_set() else None)
    monkeypatch.setattr(NodeLink, "arena", found)
    return comes


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages that equal ones have replaced right after a pass; they are the next to be taken."""
    freed: list[int] = []
    update = Cache.update_resources

    def replace_and_update(self: Cache, batch: Any) -> None:
        for request in batch.context_requests:
            held = self._held.get(request, [])
            before = [set(pages) for pages in held]
            self.replace_pages(request)
            for pool, old, new in zip(self._pools, before, held, strict=False):
                for page in old.difference(new).intersection(pool._blank):
                    pool._blank.remove(page)
                    pool._blank.appendleft(page)
                    freed.append(page)
        update(self, batch)

    monkeypatch.setattr(Cache, "update_resources", replace_and_update)
    return freed


@on(*WITH_GROUPS)
def test_pages_that_equal_ones_replace_are_not_saved_when_a_tier_comes(
    make_engine, tier_comes, replaced
):
    cold = make_engine(waits_for_tier=False, num_pages=48)
    cold.submit(PROMPT, max_new=1)
    cold.submit(PROMPT, max_new=9)
    cold.step()
    assert replaced
    cold.submit(LONG, max_new=5)
    cold.step()  # it has the pages that were replaced
    tier_comes.set()
    cold.finish()
    make_engine().serve(PROMPT)


@on(*WITH_GROUPS)
@pytest.mark.parametrize("on_device", ["device"], indirect=True)
def test_pages_that_equal_ones_replace_are_saved_before_others_get_them(
    on_device, make_engine, monkeypatch, replaced
):
    monkeypatch.setattr(Cache, "_poison", lambda *_: None)  # a device writes them in passes only
    cold = make_engine(chunk=5 * BLOCK, num_pages=48)
    cold.submit(PROMPT, max_new=9)
    cold.step()
    wait_for(lambda: cold.totals["stored_blocks"] == 5)
    cold.submit(PROMPT, max_new=9)
    with monkeypatch.context() as patch:
        gate = Gate(patch, Arena, "reserve")
        opens = threading.Timer(1.0, gate.open.set)  # a fence waits until then
        opens.start()
        while not replaced:
            cold.step()
        cold.submit(LONG, max_new=5)
        for _ in range(3):
            cold.step()
        opens.join()
    cold.finish()
    make_engine().serve(PROMPT)


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[LlmRequest]]:
    """How many front blocks of each request have gone to others.

    Source: `WindowBlockManager::adjustBlocksIfNeeded` and `detachFrontBlock`.
    """
    gone: Counter[LlmRequest] = Counter()
    prepare = Cache.prepare_resources

    def detach_and_prepare(self: Cache, batch: Any) -> None:
        for request in batch.generation_requests:
            while len(request.get_tokens(0)) - gone[request] * BLOCK >= WINDOW + BLOCK:
                (pages,) = self._held[request]
                self._release(0, [pages[gone[request]]])
                pages[gone[request]] = NO_PAGE  # it is not read again, nor reported
                gone[request] += 1
        prepare(self, batch)

    monkeypatch.setattr(Cache, "prepare_resources", detach_and_prepare)
    return gone


@on("v1_2", "v1_3rc")
def test_front_blocks_that_one_window_lets_go_are_not_saved_when_a_tier_comes(
    make_engine, tier_comes, detached
):
    cold = make_engine(waits_for_tier=False, num_pages=48, **ONE_WINDOW)
    prompt, other = (lasting(cold, start, size) for start, size in ((100, 39), (300, 99)))
    cold.submit(prompt, max_new=30)
    for _ in range(3):
        cold.step()
    assert detached
    cold.submit(other, max_new=9)
    for _ in range(2):
        cold.step()
    tier_comes.set()
    cold.finish()
    make_engine(**ONE_WINDOW).serve([*prompt[:21], 1, 2, 3])


def lasting(engine: Any, start: int, size: int) -> list[int]:
    """Return a prompt whose answer does not end by itself."""
    for last in range(900):
        request = engine._request(0, [*range(start, start + size), last], 30)
        if all(request.token_at(size + 1 + at) % 16 for at in range(30)):
            tokens: list[int] = request.get_tokens(0)
            return tokens
    raise AssertionError("there is none")


@on("v1_2", "v1_3rc", "main_line")
@pytest.mark.parametrize("on_device", ["device"], indirect=True)
def test_pages_of_a_finished_request_are_overwritten_once_they_are_saved(
    on_device, make_engine, tier_comes, monkeypatch
):
    """The request has pages equal to those of the tree; its own are free at its end."""
    monkeypatch.setattr(Cache, "_poison", lambda *_: None)  # a device writes pages in passes only
    cold = make_engine(waits_for_tier=False, is_flat=True, num_pages=40)
    cold.submit(PROMPT, max_new=1)
    twin = cold.submit(PROMPT, max_new=3)
    cold.step()
    tier_comes.set()
    with monkeypatch.context() as patch:
        gate = Gate(patch, Arena, "reserve")
        own: set[int] = set()
        while not twin.is_finished:
            own |= set(cold.cache.pages_of(twin)[0])
            cold.step()
        assert gate.reached.wait(5)
        other = cold.submit(LONG, max_new=3)
        opens = threading.Timer(0.3, gate.open.set)
        opens.start()
        cold.step()
        assert own & set(cold.cache.pages_of(other)[0])
        opens.join()
    cold.finish()
    make_engine(is_flat=True).serve(PROMPT)


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that end on their way leave all of their blocks to others.

    Source: `WindowBlockManager::releaseBlocks`, before #12673; the last block in part, too.
    """

    def free_as_if_computed(self: Cache, request: LlmRequest) -> None:
        held = self._held.pop(request, None)
        if held is None:
            return
        digests = [request.digest(at) for at in range(len(request.get_tokens(0)) - 1)]
        if not self.is_partial:
            del digests[len(digests) // BLOCK * BLOCK :]
        for group, pages in enumerate(held):
            self._pools[group].remember(digests, pages, namespace=None, keep_tail=self.is_partial)
            self._release(group, pages)

    monkeypatch.setattr(Cache, "free_resources", free_as_if_computed)


def cancel(engine: Any, prompt: list[int]) -> None:
    """Have a prompt end silently after the pass of its first chunk."""
    victim = engine.submit(prompt, max_new=4)
    engine.step()
    assert victim.is_in_context
    engine.kill(victim)


def serve_wrong(engine: Any, prompt: list[int]) -> None:
    """Serve a prompt on pages that nobody wrote, as the engine does without kvray, too."""
    engine.serve(prompt, max_new=4)
    assert engine.model.corrupt_rows, "TensorRT-LLM's own fault"
    engine.model.corrupt_rows = 0


EARLY_VERSIONS = on("v1_2", "v1_3rc")
PARTIAL: dict[str, Any] = {"is_flat": True, "cache": {"enable_partial_reuse": True}}
SYSTEM = PROMPT[: 3 * BLOCK + 2]
OTHER, NEXT, MORE = (list(range(at, at + 20)) for at in (600, 700, 800))


@EARLY_VERSIONS
@pytest.mark.parametrize("named", ["before", "later", "with its weights"])
def test_what_follows_pages_that_a_cancelled_prompt_left_unwritten_is_not_saved(
    make_engine, unwritten, named
):
    engine = make_engine(is_flat=True, chunk=3 * BLOCK)
    shared = engine.scheduler._leader.shared
    name = shared.model_name.name
    if named == "later":
        shared.model_name.name = ""
    elif named == "with its weights":
        shared.name_weights(None)
    cancel(engine, PROMPT)
    shared.model_name.name = name
    if named == "with its weights":
        shared.name_weights("v1")
    serve_wrong(engine, PROMPT)
    other = engine.serve(list(range(500, 540)), max_new=4)
    assert named == "later" or engine.totals["dropped_blocks_unwritten"] == 10
    engine.close()
    reader = make_engine(is_flat=True)
    if named == "with its weights":
        reader.scheduler._leader.shared.name_weights("v1")
    assert reader.serve([*PROMPT, 1, 2, 3]).num_hit <= 3 * BLOCK
    assert reader.serve(other.get_tokens(0)).num_hit >= 32, "others are saved as ever"


@EARLY_VERSIONS
def test_what_follows_the_text_of_a_cancelled_prompt_with_media_is_not_saved(
    make_engine, unwritten
):
    engine = make_engine(is_flat=True, chunk=3 * BLOCK)
    engine.scheduler._reader._media_tokens = MediaTokens(ids=frozenset({905}), vocab_size=997)
    cancel(engine, [*PROMPT, *[905] * 8, 3])  # it has no digest: it bypasses the tier
    serve_wrong(engine, [*PROMPT, 1, 2])
    engine.close()
    make_engine(is_flat=True).serve([*PROMPT, 1, 2, 3])


@EARLY_VERSIONS
def test_a_block_begun_by_unwritten_tokens_of_a_cancelled_prompt_is_not_saved(
    make_engine, unwritten
):
    engine = make_engine(chunk=3 * BLOCK, **PARTIAL)
    cancel(engine, [*SYSTEM, 1])
    serve_wrong(engine, [*SYSTEM, *OTHER])
    engine.close()
    make_engine(**PARTIAL).serve([*SYSTEM, *OTHER, *OTHER])


@EARLY_VERSIONS
def test_what_shares_no_unwritten_token_with_a_cancelled_prompt_is_saved(make_engine, unwritten):
    engine = make_engine(chunk=3 * BLOCK, **PARTIAL)
    engine.serve([*SYSTEM, *NEXT], max_new=4)
    cancel(engine, [*SYSTEM, *MORE])
    engine.serve([*SYSTEM, *OTHER], max_new=4)
    engine.close()
    hit = make_engine(**PARTIAL).serve([*SYSTEM, *OTHER, 1, 2]).num_hit
    assert hit >= len([*SYSTEM, *OTHER]) - BLOCK


@EARLY_VERSIONS
@pytest.mark.parametrize("is_partial", [False, True], ids=["whole_blocks", "parts"])
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["in_turn", "overlapped"])
def test_what_a_prompt_has_computed_that_is_cancelled_behind_its_pass_is_saved_with_what_follows(
    make_engine, unwritten, is_overlapped, is_partial
):
    options: dict[str, Any] = {"is_flat": True, "cache": {"enable_partial_reuse": is_partial}}
    engine = make_engine(is_overlapped=is_overlapped, **options)
    victim = engine.submit(PROMPT, max_new=9)
    engine.step()
    engine.kill(victim)
    engine.serve([*PROMPT, *OTHER], max_new=3)
    assert engine.totals["local_tokens"] >= len(PROMPT) - BLOCK, "it goes on from the victim"
    engine.close()
    assert engine.totals["dropped_blocks"] == 0
    assert make_engine(**options).serve([*PROMPT, *OTHER]).num_hit == len(PROMPT) + 20 - BLOCK


@EARLY_VERSIONS
def test_a_turn_is_saved_that_begins_beside_a_prompt_of_the_same_system(make_engine):
    """The block where the new prompt begins to compute begins like one that the turn reuses."""
    engine = make_engine(is_flat=True)
    engine.serve([*SYSTEM, *NEXT], max_new=3)
    engine.submit([*SYSTEM, *MORE], max_new=3)
    turn = [*SYSTEM, *NEXT, *OTHER]
    engine.submit(turn, max_new=3)
    engine.finish()
    assert make_engine(is_flat=True).serve(turn).num_hit == (len(turn) - 1) // BLOCK * BLOCK


@EARLY_VERSIONS
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_prompt_that_goes_on_from_one_of_the_pass_before_is_saved(make_engine, is_overlapped):
    engine = make_engine(is_flat=True, is_overlapped=is_overlapped)
    for prompt in (PROMPT, [*PROMPT, *NEXT], [*PROMPT, *OTHER]):
        engine.submit(prompt, max_new=3)
        engine.step()
    engine.finish()
    hit = make_engine(is_flat=True).serve([*PROMPT, *OTHER]).num_hit
    assert hit >= len([*PROMPT, *OTHER]) - 2 * BLOCK


@pytest.fixture
def stored_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts leave all of their blocks to others behind the pass of their first chunk.

    Source: `BlockManager::storeContextBlocks`, before #12673.
    """
    update = Cache.update_resources

    def store_and_update(self: Cache, batch: Any) -> None:
        for request in batch.context_requests:
            digests = [
                request.digest(at) for at in range((request.prompt_len - 1) // BLOCK * BLOCK)
            ]
            for pool, pages in zip(self._pools, self._held.get(request, ()), strict=False):
                pool.remember(digests, pages, namespace=None, keep_tail=False)
        update(self, batch)

    monkeypatch.setattr(Cache, "update_resources", store_and_update)


@EARLY_VERSIONS
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_what_was_computed_behind_unwritten_tokens_is_not_saved_by_those_who_reuse_it(
    make_engine, stored_early, is_overlapped
):
    engine = make_engine(is_flat=True, chunk=2 * BLOCK, is_overlapped=is_overlapped)
    slow = engine.submit(PROMPT, max_new=4)
    for _ in range(1 + is_overlapped):
        engine.step()
    assert slow.is_in_context
    serve_wrong(engine, [*PROMPT, *OTHER])
    serve_wrong(engine, [*PROMPT, *OTHER, *NEXT])
    engine.close()
    reader = make_engine(is_flat=True)
    assert reader.serve([*PROMPT, *OTHER, *NEXT, 1]).num_hit >= len(PROMPT) - BLOCK


@on("v1_2")
@pytest.mark.parametrize("seed", [1, 8, 31])
def test_whatever_is_computed_behind_unwritten_tokens_no_other_engine_loads_it(
    make_engine, stored_early, seed
):
    luck = random.Random(seed)
    cold = make_engine(
        is_flat=True,
        cache={"enable_partial_reuse": luck.random() < 0.4},
        chunk=luck.choice([1, 2, 3]) * BLOCK,
        is_overlapped=luck.random() < 0.5,
        max_batch=luck.choice([2, 4]),
        num_pages=luck.choice([60, 128]),
    )
    base = [luck.randrange(100, 890) for _ in range(60)]
    prompts, live = list[list[int]](), list[LlmRequest]()
    for _ in range(25):
        source = luck.choice([base, base, *prompts[-6:]])
        start = source[: luck.randrange(1, len(source) + 1)]
        prompt = [*start, *(luck.randrange(100, 890) for _ in range(luck.randrange(1, 14)))][:90]
        prompts.append(prompt)
        live.append(cold.submit(prompt, max_new=luck.randrange(1, 6)))
        for _ in range(luck.randrange(4)):
            cold.step()
        victims = [one for one in live if one.has_pages and one.is_in_context]
        if luck.random() < 0.2 and victims:
            cold.kill(victims[0])
        for request in [one for one in live if one.is_finished]:
            prompts.append(request.get_tokens(0))
            live.remove(request)
    cold.run()
    assert cold.model.corrupt_rows, "TensorRT-LLM's own fault"
    cold.model.corrupt_rows = 0
    cold.close()
    reader = make_engine(is_flat=True, num_pages=400)
    assert sum(reader.serve([*prompt, 1, 2]).num_hit for prompt in prompts)
