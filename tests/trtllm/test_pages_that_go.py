"""Pages of a running request that its manager gives to others, which no report shows.

The second manager puts equal pages of others in the place of those that a request has computed; the
first one, with one window, lets front blocks go. Blocks that are saved later would have bytes of
others, with checksums that are right.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvray.node import NodeLink
from kvray.store import Arena
from tests.trtllm.cache import NO_PAGE, Cache
from tests.trtllm.conftest import PROMPT
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, GroupShape, Shape
from tests.trtllm.version import WITH_GROUPS, on
from tests.waiting import Gate, wait_for

WINDOW = 8
ONE_WINDOW: dict[str, Any] = {
    "shape": Shape(name="one-window", groups=(GroupShape(layers=(0, 1), window=WINDOW),)),
    "is_flat": True,
    "cache": {"max_attention_window": [WINDOW]},
}


class Absence:
    """Of the tier, as engines see it, until it `ends`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ends = threading.Event()
        arena = NodeLink.arena.fget
        assert arena is not None
        found = property(lambda link: arena(link) if self.ends.is_set() else None)
        patch.setattr(NodeLink, "arena", found)


@pytest.fixture
def absence(monkeypatch: pytest.MonkeyPatch) -> Absence:
    return Absence(monkeypatch)


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
    make_engine, absence, replaced
):
    cold = make_engine(waits_for_tier=False, num_pages=48)
    cold.submit(PROMPT, max_new=1)
    cold.submit(PROMPT, max_new=9)
    cold.step()
    assert replaced
    cold.submit(list(range(300, 400)), max_new=5)
    cold.step()  # it has the pages that were replaced
    absence.ends.set()
    cold.run()
    cold.close()
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
        cold.submit(list(range(300, 400)), max_new=5)
        for _ in range(3):
            cold.step()
        opens.join()
    cold.run()
    cold.close()
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


def test_front_blocks_that_one_window_lets_go_are_not_saved_when_a_tier_comes(
    make_engine, absence, detached
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
    absence.ends.set()
    cold.run()
    cold.close()
    make_engine(**ONE_WINDOW).serve([*prompt[:21], 1, 2, 3])


def lasting(engine: Any, start: int, size: int) -> list[int]:
    """Return a prompt whose answer does not end by itself."""
    for last in range(900):
        request = engine._request(0, [*range(start, start + size), last], 30)
        if all(request.token_at(size + 1 + at) % 16 for at in range(30)):
            tokens: list[int] = request.get_tokens(0)
            return tokens
    raise AssertionError("there is none")


@pytest.mark.parametrize("on_device", ["device"], indirect=True)
def test_an_end_that_is_announced_twice_while_it_is_saved_ends_once(
    on_device, make_engine, monkeypatch
):
    """As newer engines do, whose ended requests keep their blocks while they are saved."""
    indices, store = Cache.get_cache_indices, Cache.store_blocks_for_reuse

    def kept(self: Cache, request: LlmRequest) -> list[list[int]]:
        return self._pinned[request] if request in self._pinned else indices(self, request)

    def store_once(self: Cache, request: LlmRequest, *, pin: bool) -> None:
        assert request not in self._pinned, "it would be kept for ever"
        store(self, request, pin=pin)

    monkeypatch.setattr(Cache, "get_cache_indices", kept)
    monkeypatch.setattr(Cache, "store_blocks_for_reuse", store_once)
    engine = make_engine(is_overlapped=True)
    # The first token ends the answer, while the next pass has begun.
    ends = next(
        [*PROMPT, last]
        for last in range(900)
        if engine._request(0, [*PROMPT, last], 9).token_at(len(PROMPT) + 1) % 16 == 0
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvray.engine.saver._STALL_S", 0.1
        )  # a fence gives the save up, which reads on
        gate = Gate(patch, Arena, "reserve")
        request = engine.submit(ends, max_new=9)
        for _ in range(5):
            engine.step()
        assert request.is_finished
        gate.open.set()
    engine.run()
    assert not engine.cache._pinned
