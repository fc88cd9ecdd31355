"""Replicas that are asked without a pause, each by a thread of its own; dead ones start again."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvray.cli.chaos.load import MAX_TOKENS, TOKENS_PER_BLOCK, Answer, Ask, Batch
from kvray.errors import KVRayError
from kvray.reference import KvConnectorConfig, Replica

MODEL = "tiny:11"
POOL_BLOCKS = 96
BATCH_SIZE = 12
"""Prompts that a replica is asked at once; it computes some, and the others wait in its queue."""

_MODULE = "kvray.cli.chaos.stalls"
_RUNNING_MAX = 8
_ANSWER_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_RESTART_PAUSE_S = 0.2
_FAILURES_MAX = 20

Prompts = Callable[[Ask], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answered prompt. Times are monotonic."""

    replica: str
    place: int
    """See `Batch`."""
    began: float
    ended: float
    prompt_tokens: int
    reused_tokens: int
    hit_tokens: int
    wrong_tokens: int


@dataclass(slots=True, kw_only=True)
class Losses:
    """Requests without an answer, and engines that died."""

    engine_deaths: int = 0
    hung_requests: int = 0
    failed_requests: int = 0
    injected_deaths: int = 0
    injected_requests: int = 0
    """Requests that an injected death took with it."""


class Server:
    """One replica on a node, and the thread that asks it.

    Records and counters are the thread's until it has ended; `in_flight` and `is_injected` cross.
    """

    def __init__(
        self,
        name: str,
        *,
        node_number: int,
        environ: Mapping[str, str],
        stalls_path: Path,
        log_path: Path,
        is_empty: bool = False,
    ) -> None:
        """Describe a replica that does not run yet.

        Args:
            name: for people and for kvray.
            node_number: index of its node.
            environ: variables with which it finds its node's tier.
            stalls_path: where its scheduler writes its stalls.
            log_path: where what it prints goes.
            is_empty: give it a connector that does nothing.
        """
        self.name = name
        self.node_number = node_number
        self.stalls_path = stalls_path
        self.served: list[Served] = []
        self.losses = Losses()
        self.failures: list[str] = []
        self.stops: list[tuple[float, float]] = []
        """When it was stopped on purpose, in monotonic seconds."""
        self.in_flight = 0
        self._environ = {**environ, "KVRAY_CONNECTOR__REPLICA": name}
        self._log_path = log_path
        self._connector = KvConnectorConfig(
            connector_module=_MODULE,
            connector_scheduler_class=f"{'Empty' if is_empty else 'Timed'}Scheduler@{stalls_path}",
            connector_worker_class="EmptyWorker" if is_empty else "KvRayWorker",
        )
        self._replica: Replica | None = None
        self._killed_pid = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_start(self) -> None:
        """Start the replica, and do not wait for it."""
        self._replica = spawn(
            self.name, self._connector, environ=self._environ, log_path=self._log_path
        )

    def wait_ready(self) -> None:
        """Return when the replica answers.

        Raises:
            KVRayError: it did not start.
        """
        assert self._replica is not None
        self._replica.wait_ready()

    def serve(
        self, batches: Iterator[Batch], prompts: Prompts, truth: Mapping[Ask, Answer]
    ) -> None:
        """Ask batch after batch from now on, until `end`."""
        self._stopping.clear()
        self._thread = threading.Thread(
            target=self._serve, args=(batches, prompts, truth), name=f"kvray-{self.name}"
        )
        self._thread.start()

    def kill(self) -> bool:
        """Kill the replica as an injected fault; False if it is not running now."""
        replica = self._replica
        if replica is None or not self.in_flight or not replica.is_alive:
            return False
        self._killed_pid = replica.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(replica.pid, signal.SIGKILL)
        return True

    def stop(self) -> int | None:
        """Stop the replica's process; return its pid, or None if it is not running now."""
        replica = self._replica
        if replica is None or not self.in_flight or not replica.is_alive:
            return None
        self.stops.append((time.monotonic(), float("inf")))
        os.kill(replica.pid, signal.SIGSTOP)
        return replica.pid

    def resume(self, pid: int) -> None:
        """Let a stopped replica go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.stops[-1] = (self.stops[-1][0], time.monotonic())

    def end(self) -> None:
        """Let the batch that is out be answered, and ask no more. Twice is fine."""
        self._stopping.set()

    def join(self) -> None:
        """Return when the thread has ended; `end` was called."""
        if self._thread is not None:
            self._thread.join(_ANSWER_TIMEOUT_S + _JOIN_TIMEOUT_S)
            self._thread = None

    def close(self) -> None:
        """End thread and replica at once. Twice is fine."""
        self._stopping.set()
        if self._replica is not None:
            self._killed_pid = self._replica.pid
            self._replica.kill()
        self.join()
        if self._replica is not None:  # the thread was just starting another one
            self._replica.kill()

    def _serve(
        self, batches: Iterator[Batch], prompts: Prompts, truth: Mapping[Ask, Answer]
    ) -> None:
        for batch in batches:
            if self._stopping.is_set():
                break
            try:
                self._ask(batch, prompts, truth)
            except KVRayError as error:
                self._note(error, len(batch.asks))
                self._restart()
            finally:
                self.in_flight = 0

    def _ask(self, batch: Batch, prompts: Prompts, truth: Mapping[Ask, Answer]) -> None:
        assert self._replica is not None
        tokens = [prompts(ask) for ask in batch.asks]
        began = time.monotonic()
        self.in_flight = len(batch.asks)
        outputs = self._replica.generate(tokens, max_tokens=MAX_TOKENS, timeout_s=_ANSWER_TIMEOUT_S)
        ended = time.monotonic()
        self.served += [
            Served(
                replica=self.name,
                place=batch.place,
                began=began,
                ended=ended,
                prompt_tokens=output.prompt_tokens,
                reused_tokens=output.reused_tokens,
                hit_tokens=output.hit_tokens,
                wrong_tokens=count_wrong(output.token_ids, truth[ask]),
            )
            for ask, output in zip(batch.asks, outputs, strict=True)
        ]

    def _note(self, error: KVRayError, num_requests: int) -> None:
        assert self._replica is not None
        losses, text = self.losses, str(error)
        if self._replica.pid == self._killed_pid:
            losses.injected_deaths += not self._stopping.is_set()
            losses.injected_requests += num_requests
            return
        if "has not ended within" in text or "did not answer in time" in text:
            losses.hung_requests += num_requests
        elif "A forward pass failed" in text:
            losses.failed_requests += num_requests
        else:
            losses.engine_deaths += 1
        if len(self.failures) < _FAILURES_MAX:
            self.failures.append(f"{self.name}: {text}")

    def _restart(self) -> None:
        """Start the replica anew, again and again until it answers or nobody wants it."""
        while not self._stopping.is_set():
            assert self._replica is not None
            self._replica.kill()
            try:
                self.begin_start()
                self.wait_ready()
                return
            except KVRayError as error:
                self._note(error, 0)
                self._stopping.wait(_RESTART_PAUSE_S)


def spawn(
    name: str,
    connector: KvConnectorConfig | None,
    *,
    environ: Mapping[str, str],
    log_path: Path | None = None,
) -> Replica:
    """Begin to start an engine of the run; with `connector` None one that reuses nothing."""
    return Replica.spawn(
        name,
        env=environ,
        log_path=log_path,
        model=MODEL,
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=POOL_BLOCKS,
        connector=connector,
        enable_block_reuse=connector is not None,
        max_batch_size=_RUNNING_MAX,
        num_threads=1,
    )


def count_wrong(answer: Answer, truth: Answer) -> int:
    """Return how many tokens of an answer differ, missing and surplus ones included."""
    differing = sum(mine != true for mine, true in zip(answer, truth, strict=False))
    return differing + abs(len(answer) - len(truth))
