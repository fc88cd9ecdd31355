"""The child that drives TensorRT-LLM, with a stand-in for its LLM API."""

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.routers.pools import EVENTS_STAT, Pools
from kvray.errors import ConfigError, KVRayError
from kvray.reference import KvConnectorConfig, Replica
from kvray.routing import PoolMatch
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
LLM = '''
import asyncio
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, *, max_tokens, temperature, top_k):
        assert temperature == 0.0
        self.max_tokens = max_tokens

class Result:
    """As `RequestOutput`: an asynchronous iterator over itself as it grows."""

    def __init__(self, prompt, params):
        self.prompt_token_ids = prompt
        self.cached_tokens = 4
        self.outputs = [SimpleNamespace(text="", token_ids=[], finish_reason=None)]
        self._max_tokens, self._is_aborted = params.max_tokens, False

    def abort(self):
        self._is_aborted = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        answer = self.outputs[0]
        if answer.finish_reason or self._is_aborted:
            raise StopAsyncIteration
        await asyncio.sleep(0.002)
        answer.token_ids.append(sum(self.prompt_token_ids) + len(answer.token_ids))
        if len(answer.token_ids) == self._max_tokens:
            answer.finish_reason = "length"
        return self

class LLM:
    def __init__(self, *, model, backend, kv_cache_config, kv_connector_config):
        assert backend == "pytorch"
        if model == "none":
            raise ValueError("there is no such model")
        self._has_answered, self._events = False, []
        given = dict(kv_cache_config.given)
        assert given.pop("tokens_per_block", 32) in (4, 32)
        if given.pop("event_buffer_max_size", 0):
            tokens = [{"type": "unique_token", "token_id": number} for number in range(4)]
            block = {"type": "stored_block", "block_hash": 1, "tokens": tokens, "cache_level": 0}
            data = {"type": "stored", "parent_hash": None, "blocks": [block]}
            self._events = [{"event_id": 0, "data": data, "window_size": 64}]
        assert given == {"enable_block_reuse": True, "enable_partial_reuse": False}
        assert kv_connector_config.given["connector_module"] == "kvray.connector"

    def shutdown(self):
        pass

    def get_kv_cache_events(self, timeout):
        assert timeout == 0
        if not self._has_answered:
            raise RuntimeError("IterationResult is not properly instantiated")
        events, self._events = self._events, []
        return events

    def generate_async(self, prompt, params, *, streaming):
        assert streaming
        self._has_answered = True
        if len(prompt) > 8:
            raise ValueError("the prompt is too long")
        if prompt == [7]:
            raise KeyError("a defect of the engine")
        return Result(prompt, params)
'''
ARGS = """
class KvCacheConfig:
    def __init__(self, **given):
        self.given = given

class KvCacheConnectorConfig(KvCacheConfig):
    pass
"""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    package = tmp_path / "tensorrt_llm"
    (package / "llmapi").mkdir(parents=True)
    (package / "__init__.py").write_text(LLM)
    (package / "llmapi" / "__init__.py").touch()
    (package / "llmapi" / "llm_args.py").write_text(ARGS)
    return {
        "module": "kvray.serve.trtllm_child",
        "env": {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        "connector": KvConnectorConfig(),
    }


@contextmanager
def started(options: dict[str, Any]) -> Iterator[Replica]:
    with Replica("llm", **{"model": "some", **options}) as replica:
        replica.wait_ready(DEADLINE_S)
        yield replica


@pytest.fixture
def replica(options: dict[str, Any]) -> Iterator[Replica]:
    with started(options) as replica:
        yield replica


def test_tokens_come_one_by_one_and_the_answer_has_what_was_cached(replica):
    heard: list[int] = []
    call = replica.submit([1, 2, 3], max_tokens=5, listener=heard.extend)
    output = call.future.result(DEADLINE_S)
    assert heard == [6, 7, 8, 9, 10] == list(output.token_ids)
    assert (output.prompt_tokens, output.reused_tokens, output.finish_reason) == (3, 4, "length")


@pytest.mark.parametrize("takes_it", [True, False])
def test_an_engine_that_makes_spans_gets_the_requests_traceparent(options, tmp_path, takes_it):
    if takes_it:
        told = (
            "return Result([len(trace_headers['traceparent'])] if trace_headers else [0], params)"
        )
        llm = LLM.replace("*, streaming):", "*, streaming, trace_headers=None):")
        llm = llm.replace("return Result(prompt, params)", told)
        (tmp_path / "tensorrt_llm" / "__init__.py").write_text(llm)
    with started(options) as replica:
        traced = replica.submit([1], max_tokens=1, trace="t" * 55)
        assert traced.future.result(DEADLINE_S).token_ids == (55 if takes_it else 1,)
        assert replica.generate([1], max_tokens=1).token_ids == (0 if takes_it else 1,)


def test_its_kv_events_are_published_from_the_first_request_on(options):
    options |= {"event_host": "127.0.0.1", "event_buffer_max_size": 8}
    options["kv_cache_config"] = {"tokens_per_block": 4}
    pools = Pools()
    with started(options) as replica, closing(pools):
        pools.follow({"llm": {EVENTS_STAT: replica.event_metadata}})
        replica.generate([1], max_tokens=1)
        found = {"llm": PoolMatch(num_tokens=4, is_sure=True)}
        wait_for(lambda: pools.match([0, 1, 2, 3]) == found, "the block")


def test_a_cancelled_call_ends_early(replica):
    begun = threading.Event()
    call = replica.submit([1], max_tokens=100_000, listener=lambda _: begun.set())
    assert begun.wait(DEADLINE_S)
    replica.cancel(call)
    assert call.future.result(DEADLINE_S).finish_reason == "cancelled"
    assert replica.generate([1], max_tokens=1).token_ids == (1,)


def test_a_call_that_is_cancelled_before_it_has_begun_ends_early(replica):
    calls = [replica.submit([1], max_tokens=100_000) for _ in range(8)]
    for call in calls:
        replica.cancel(call)
    for call in calls:
        assert call.future.result(DEADLINE_S).finish_reason == "cancelled"


def test_a_defect_of_the_engine_is_an_answer_and_others_go_on(replica):
    with pytest.raises(KVRayError, match="a defect of the engine"):
        replica.generate([7], timeout_s=DEADLINE_S)
    assert replica.generate([1], max_tokens=1).token_ids == (1,)


def test_what_the_engine_refuses_is_a_sentence(replica):
    with pytest.raises(ConfigError, match="the prompt is too long"):
        replica.generate([1] * 9)


def test_an_engine_that_does_not_start_says_why(options):
    with pytest.raises(KVRayError, match="there is no such model"):
        with started({**options, "model": "none"}):
            pass
