"""The engines of the demo, in processes of their own, beside a tier that is up.

They may be of several makes. Each phase of the demo sends prompts to them.
"""

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from kvray.client import Client
from kvray.errors import ConfigError
from kvray.lab import vllm
from kvray.lab.demo import prompts
from kvray.lab.demo.prompts import TOKENS_PER_BLOCK, Prompts, shareable_tokens
from kvray.lab.demo.record import ORACLE, WITH_KVRAY, WITHOUT_KVRAY, Record
from kvray.reference import KvConnectorConfig, Replica

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
ONE, TWO = "replica-1", "replica-2"
_POOL_BLOCKS = prompts.LONG_BLOCKS + 2
"""The blocks of the long prompt and its answer, and one more."""
_OFFLOAD_POOL_BLOCKS = prompts.OFFLOAD_BLOCKS + 1
"""Room for one prompt of phase c with its answer, and for nothing else."""


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


class Phase(NamedTuple):
    """One phase; `num_steps` counts the starts and prompts in `play`."""

    name: str
    title: str
    num_steps: int
    play: Callable[[Engines], None]


def ask_oracle(engines: Engines) -> None:
    """Answer every prompt with an engine that has no connector and reuses nothing."""
    engines.start(ORACLE, num_blocks=_POOL_BLOCKS, with_kvray=False, with_reuse=False)
    for prompt in engines.prompts:
        engines.ask(ORACLE, ORACLE, prompt)
    engines.end(ORACLE)


def share_long_prompts(engines: Engines) -> None:
    """Phase a: replica 1 computes prompts, replica 2 copies their blocks."""
    engines.start(ONE, TWO, num_blocks=_POOL_BLOCKS)
    for prompt in (prompts.LONG, prompts.UNALIGNED):
        shared = shareable_tokens(len(engines.prompts[prompt]))
        engines.ask("a", ONE, prompt, expected_hit_tokens=0, until_saved=True)
        engines.ask("a", TWO, prompt, expected_hit_tokens=shared)


def share_system_prompt(engines: Engines) -> None:
    """Phase b: prompts that differ after a common beginning share the beginning."""
    first, second, third = prompts.SAME_SYSTEM
    engines.ask("b", ONE, first, expected_hit_tokens=0, until_saved=True)
    engines.ask(
        "b", TWO, second, expected_hit_tokens=prompts.SYSTEM_BLOCKS * prompts.TOKENS_PER_BLOCK
    )
    engines.ask("b", ONE, third)


def offload(engines: Engines) -> None:
    """Phase c: A, B, A, B on a pool that holds one of them, without kvray and with it."""
    for name in (WITHOUT_KVRAY, WITH_KVRAY):
        with_kvray = name == WITH_KVRAY
        engines.start(name, num_blocks=_OFFLOAD_POOL_BLOCKS, with_kvray=with_kvray)
        for is_first in (True, False):
            for prompt in (prompts.OFFLOAD_A, prompts.OFFLOAD_B):
                engines.ask("c", name, prompt, until_saved=with_kvray and is_first)
        engines.end(name)


def restart(engines: Engines) -> None:
    """Phase d: both replicas restart, and their first prompt hits at once."""
    engines.end(ONE, TWO)
    engines.start(ONE, TWO, num_blocks=_POOL_BLOCKS)
    for replica, prompt in ((ONE, prompts.LONG), (TWO, prompts.UNALIGNED)):
        shared = shareable_tokens(len(engines.prompts[prompt]))
        engines.ask("d", replica, prompt, expected_hit_tokens=shared)
    engines.end(ONE, TWO)


ORACLE_PHASE = Phase(ORACLE, "The answers without any reuse", 8, ask_oracle)
PHASES = (
    Phase("a", "one long prompt on two replicas", 5, share_long_prompts),
    Phase("b", "one system prompt, three questions", 3, share_system_prompt),
    Phase("c", "A, B, A, B on a pool for one", 10, offload),
    Phase("d", "both replicas restarted", 3, restart),
)
