"""The engines of the demo, in processes of their own, beside a tier that is up; their makes."""

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from kvray.client import Client
from kvray.errors import ConfigError
from kvray.lab import vllm
from kvray.lab.demo.prompts import TOKENS_PER_BLOCK, Prompts
from kvray.lab.demo.record import Record
from kvray.lab.reference import KvConnectorConfig, Replica

Make = Callable[..., dict[str, Any]]
"""Returns the arguments of `Replica.spawn` for a model, a pool of `num_blocks` and so many threads,
`with_kvray` or without, `with_reuse` of the pool's own blocks or without."""

_CONNECTOR = KvConnectorConfig(
    connector_module="kvray.connector",
    connector_scheduler_class="KvRayScheduler",
    connector_worker_class="KvRayWorker",
)
_MAX_TOKENS = 16
_THREADS_MAX = 4
_SAVED_TIMEOUT_S = 20.0
_POLL_S = 0.02


def find_make(name: str) -> Make:
    """Return the make of that name; ConfigError: there is none, or it is not installed."""
    if name not in _MAKES:
        raise ConfigError(f"There is no engine {name!r}; give one of {', '.join(sorted(_MAKES))}.")
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here; install it, or run `make test-vllm` in a checkout, which"
            " makes an environment with vLLM for the CPU."
        )
    return _MAKES[name]


def _reference(
    model: str, num_blocks: int, *, num_threads: int, with_kvray: bool, with_reuse: bool
) -> dict[str, Any]:
    return {
        "model": model,
        "tokens_per_block": TOKENS_PER_BLOCK,
        "num_blocks": num_blocks,
        "connector": _CONNECTOR if with_kvray else None,
        "enable_block_reuse": with_reuse,
        "num_threads": num_threads,
    }


def _vllm(
    model: str, num_blocks: int, *, num_threads: int, with_kvray: bool, with_reuse: bool
) -> dict[str, Any]:
    return {
        "module": vllm.MODULE,
        "env": vllm.environ(num_threads),
        "model": model,
        "block_size": TOKENS_PER_BLOCK,
        "num_blocks": num_blocks + 1,  # vLLM keeps one for itself
        "max_model_len": num_blocks * TOKENS_PER_BLOCK,
        "dtype": "float32",
        "enable_prefix_caching": with_reuse,
        "with_kvray": with_kvray,
    }


_MAKES: dict[str, Make] = {"reference": _reference, "vllm": _vllm}


class Engines:
    """Starts engines, sends them prompts, and records their answers."""

    def __init__(
        self,
        client: Client,
        prompts: Prompts,
        *,
        model: str,
        make: Make,
        environ: Mapping[str, str],
    ) -> None:
        """Begin without an engine; `environ` has the variables with which one finds the tier."""
        self.prompts = prompts
        self.records: list[Record] = []
        self.advance: Callable[[], None] = lambda: None
        """Called after each start and each answer, for a bar that moves."""
        self._client = client
        self._model = model
        self._make = make
        self._environ = environ
        # Equal answers need equal numbers of threads.
        self._num_threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._replicas: dict[str, Replica] = {}

    def start(
        self, *names: str, num_blocks: int, with_kvray: bool = True, with_reuse: bool = True
    ) -> None:
        """Start engines side by side and return when all are ready."""
        for name in names:
            made = self._make(
                self._model,
                num_blocks,
                num_threads=self._num_threads,
                with_kvray=with_kvray,
                with_reuse=with_reuse,
            )
            named = {"KVRAY_CONNECTOR__REPLICA": name.replace(" ", "-")}
            env = {**self._environ, **named, **made.pop("env", {})}
            self._replicas[name] = Replica.spawn(name, env=env, **made)
        for name in names:
            self._replicas[name].wait_ready()
        self.advance()

    def end(self, *names: str) -> None:
        """Let engines end on their own."""
        for name in names:
            self._replicas.pop(name).close()

    def close(self) -> None:
        """End all engines at once. Twice is fine."""
        while self._replicas:
            self._replicas.popitem()[1].kill()

    def ask(
        self,
        phase: str,
        replica: str,
        prompt: str,
        *,
        expected_hit_tokens: int | None = None,
        until_saved: bool = False,
    ) -> None:
        """Send a prompt to one engine and record the answer.

        `until_saved` returns when the computed blocks are in the tier, to which the prompt must be
        new. If they do not come, the hits that follow will tell.
        """
        stored_before = self._num_stored() if until_saved else 0
        tokens = self.prompts[prompt]
        output = self._replicas[replica].generate([tokens], max_tokens=_MAX_TOKENS)[0]
        self.records.append(
            Record(
                phase=phase,
                replica=replica,
                prompt=prompt,
                output=output,
                expected_hit_tokens=expected_hit_tokens,
            )
        )
        if until_saved:
            computed = output.prompt_tokens - output.reused_tokens - output.hit_tokens
            num_stored = stored_before + computed // TOKENS_PER_BLOCK
            deadline = time.monotonic() + _SAVED_TIMEOUT_S
            while self._num_stored() < num_stored and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self.advance()

    def _num_stored(self) -> int:
        return sum(shard["arena"]["stored"] for shard in self._client.status()["shards"])
