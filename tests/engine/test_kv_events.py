"""The engine's events give its pool, in TensorRT-LLM's shape, evictions included."""

from typing import Any

import pytest

from kvray.errors import ConfigError
from kvray.events import Batch
from kvray.events.native import NativePool
from kvray.events.pool_content import PoolContent, chain_digests
from kvray.lab.reference.engine import ReferenceEngine
from tests.engine.conftest import BLOCK, MakeEngine, make_prompt


class Heard:
    """What a router makes of an engine's events."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self.pool = NativePool(block_size=BLOCK)
        self.content = PoolContent(blocks_max=1000)
        self.kinds: set[str] = set()

    def leading(self, tokens: list[int]) -> int:
        events: list[Any] = self._engine.get_kv_cache_events()
        self.kinds |= {one["data"]["type"] for one in events}
        self.content.apply(Batch(at=0.0, events=self.pool.take(events)))
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        digests = {BLOCK: chain_digests(packed, block_size=BLOCK)}
        return self.content.num_tokens(digests) // BLOCK


@pytest.mark.parametrize("options", [{}, {"enable_partial_reuse": True}, {"overlap": True}])
def test_what_events_tell_is_what_the_engine_reuses(
    make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    engine = make_engine(num_blocks=16, event_buffer_max_size=1000, **options)
    heard = Heard(engine)
    for number in [0, 1, 2, 3, 4, 0, 1, 1, 5, 2, 0, 6, 6, 3]:
        prompt = make_prompt(3 * BLOCK + 5, seed=number)
        told = heard.leading(prompt)
        output = engine.generate(prompt, max_tokens=4)
        assert output.reused_tokens // BLOCK == told
    assert heard.kinds == {"created", "stored", "removed"}
    assert heard.pool.num_gaps == heard.pool.num_unread == 0


def test_a_buffer_that_is_too_small_shows_as_a_gap(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, event_buffer_max_size=2)
    heard = Heard(engine)
    heard.leading([])
    for number in range(8):
        engine.generate(make_prompt(3 * BLOCK, seed=number), max_tokens=4)
    heard.leading([])
    assert heard.pool.num_gaps == 1


def test_salted_prompts_stay_inside(make_engine: MakeEngine) -> None:
    engine = make_engine(event_buffer_max_size=1000)
    heard, prompt = Heard(engine), make_prompt(2 * BLOCK + 1)
    engine.generate(prompt, max_tokens=2, salt="a")
    assert heard.leading(prompt) == heard.pool.num_blocks() == 0
    engine.generate(prompt, max_tokens=2)
    assert heard.leading(prompt) == 2


def test_without_a_buffer_nothing_is_told(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(make_prompt(2 * BLOCK), max_tokens=2)
    assert engine.get_kv_cache_events() == []


def test_ranks_with_pools_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="are not gathered"):
        ReferenceEngine(
            "tiny", tensor_parallel_size=2, enable_attention_dp=True, event_buffer_max_size=8
        )
