"""Context servers: TensorRT-LLM sends the blocks of their prompts on, kvray saves and loads them.

A request ends with its prompt. Its pages stay until both the other server and the saves have them.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.errors import ConfigError
from tests.trtllm.conftest import MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.shapes import BLOCK
from tests.trtllm.test_start_up import make_halves
from tests.trtllm.version import Version

PROMPTS = [list(range(at, at + 30 + at // 100)) for at in range(100, 900, 100)]
WHOLE = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def sending(**transfers: Any) -> dict[str, Any]:
    """Return the settings of a server that sends blocks."""
    return {
        "disable_overlap_scheduler": True,
        "cache_transceiver_config": SimpleNamespace(backend="DEFAULT", **transfers),
    }


def prefill_all(engine: Engine) -> list[int]:
    """Serve all prompts, some at once; return how many tokens were loaded of each."""
    requests = [engine.submit(list(prompt), is_only_prefilled=True) for prompt in PROMPTS]
    engine.run()
    return [request.num_hit for request in requests]


@pytest.mark.parametrize("chunk", [None, 2 * BLOCK])
def test_context_servers_load_and_send_what_another_has_computed(
    on_device: None, make_engine: MakeEngine, chunk: int | None
) -> None:
    cold = make_engine(num_pages=48, chunk=chunk, **sending())
    prefill_all(cold)
    cold.close()
    warm = make_engine(num_pages=48, chunk=chunk, **sending())
    assert prefill_all(warm) == WHOLE


def test_ranks_of_a_context_server_send_their_own_bytes(make_engine: MakeEngine) -> None:
    cold = make_engine(num_ranks=2, **sending())
    prefill_all(cold)
    cold.close()
    assert prefill_all(make_engine(num_ranks=2, **sending())) == WHOLE


@pytest.mark.parametrize("overlap", [None, False])
def test_a_server_that_only_generates_is_refused(version: Version, overlap: bool | None) -> None:
    settings = sending() | {"disable_overlap_scheduler": overlap}
    with pytest.raises(ConfigError, match="without kv_connector_config"):
        make_halves(version, **settings)


def test_sending_while_a_pass_runs_is_refused(version: Version) -> None:
    with pytest.raises(ConfigError, match="enable_pipelined_transfer to false"):
        make_halves(version, **sending(enable_pipelined_transfer=True))


def test_a_server_without_a_backend_sends_nothing(version: Version) -> None:
    transfers = SimpleNamespace(backend=None, enable_pipelined_transfer=True)
    for half in make_halves(version, cache_transceiver_config=transfers):
        half.shutdown()
