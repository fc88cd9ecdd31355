"""What the phases play on: engines in processes of their own, beside a tier that is up."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvray.cli.connector_config import MODULE, SCHEDULER_CLASS, WORKER_CLASS
from kvray.cli.demo.prompts import Prompt
from kvray.cli.demo.record import Record
from kvray.client import Client
from kvray.reference import KvConnectorConfig, Replica

TOKENS_PER_BLOCK = 32
MAX_TOKENS = 16

_SAVED_TIMEOUT_S = 20.0
_POLL_S = 0.02
_CONNECTOR = KvConnectorConfig(
    connector_module=MODULE,
    connector_scheduler_class=SCHEDULER_CLASS,
    connector_worker_class=WORKER_CLASS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How to start one."""

    name: str
    num_blocks: int
    with_kvray: bool = True
    with_reuse: bool = True


class Stage:
    """Starts engines, asks them, and writes down what they answer."""

    def __init__(
        self,
        client: Client,
        *,
        model: str,
        environ: Mapping[str, str],
        num_threads: int,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Have no engine yet.

        Args:
            client: connected to the tier.
            model: what the engines load.
            environ: variables with which an engine finds the tier.
            num_threads: of each engine; equal answers need equal numbers.
            advance: called after each step, for a bar that moves.
        """
        self.records: list[Record] = []
        self.advance = advance
        self._client = client
        self._model = model
        self._environ = environ
        self._num_threads = num_threads
        self._replicas: dict[str, Replica] = {}

    def start(self, *engines: Engine) -> None:
        """Start engines side by side and return when all are ready."""
        for engine in engines:
            self._replicas[engine.name] = Replica.spawn(
                engine.name,
                env={
                    **self._environ,
                    "KVRAY_CONNECTOR__REPLICA": engine.name.replace(" ", "-"),
                },
                model=self._model,
                tokens_per_block=TOKENS_PER_BLOCK,
                num_blocks=engine.num_blocks,
                connector=_CONNECTOR if engine.with_kvray else None,
                enable_block_reuse=engine.with_reuse,
                num_threads=self._num_threads,
            )
        for engine in engines:
            self._replicas[engine.name].wait_ready()
        self.advance()

    def end(self, *names: str) -> None:
        """Let engines end on their own."""
        for name in names:
            self._replicas.pop(name).close()

    def close(self) -> None:
        """End at once whatever still runs. Twice is fine."""
        for name in list(self._replicas):
            self._replicas.pop(name).kill()

    def ask(
        self,
        phase: str,
        replica: str,
        prompt: Prompt,
        *,
        expected_hit_tokens: int | None = None,
        until_saved: bool = False,
    ) -> Record:
        """Ask one engine and write its answer down.

        Args:
            phase: where in the demo.
            replica: the engine's name.
            prompt: what to ask.
            expected_hit_tokens: see `Record`.
            until_saved: return when the blocks that were computed here are in the tier; the
                prompt must be new to it. If they do not come, the hits that follow will tell.
        """
        stored_before = self._num_stored() if until_saved else 0
        output = self._replicas[replica].generate([prompt.token_ids], max_tokens=MAX_TOKENS)[0]
        record = Record(
            phase=phase,
            replica=replica,
            prompt=prompt.name,
            prompt_tokens=output.prompt_tokens,
            reused_tokens=output.reused_tokens,
            hit_tokens=output.hit_tokens,
            ttft_s=output.ttft_s,
            text=output.text,
            token_ids=output.token_ids,
            expected_hit_tokens=expected_hit_tokens,
        )
        self.records.append(record)
        if until_saved:
            found = output.reused_tokens + output.hit_tokens
            self._await_stored(stored_before + (output.prompt_tokens - found) // TOKENS_PER_BLOCK)
        self.advance()
        return record

    def _await_stored(self, num_blocks: int) -> None:
        deadline = time.monotonic() + _SAVED_TIMEOUT_S
        while self._num_stored() < num_blocks and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _num_stored(self) -> int:
        return sum(shard["arena"]["stored"] for shard in self._client.status()["shards"])


def shareable_tokens(num_tokens: int) -> int:
    """Return how many tokens of a prompt another engine can take from the tier.

    Full blocks only, and never the whole prompt: the engine computes at least one token.
    """
    return (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def config_text(*, cluster_name: str, directory: Path, capacity: int, model_key: str | None) -> str:
    """Return the YAML of the demo's tier."""
    # Weights that exist in memory alone have no checkpoint to tell them by.
    connector = f"connector:\n  model_key: {model_key}\n" if model_key else ""
    return connector + (
        f"cluster_name: {cluster_name}\n"
        "arena:\n"
        f"  dir: {directory}\n"
        f"  capacity: {capacity}\n"
        # Two engines, a shard and Ray may share two cores: wait for a neighbour to be scheduled.
        "  lock_wait_s: 0.05\n"
    )
