"""Replicas that get prompts without a pause and are restarted; an engine without kvray is right."""

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvray.errors import KVRayError
from kvray.lab.chaos import load
from kvray.lab.chaos.load import MAX_TOKENS, TOKENS_PER_BLOCK, Answers, Ask, Phase, Tokens
from kvray.reference import KvConnectorConfig, Output, Replica
from kvray.reference.output import count_wrong

_POOL_BLOCKS = 96
_RUNNING_MAX = 8
_ANSWER_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_RESTART_PAUSE_S = 0.2
_FAILURES_MAX = 20

Losses = Counter[str]
"""Requests without an answer, and engines that died: `engine_deaths`, `hung_requests` and
`failed_requests`. With engines that faults killed: `injected_deaths` and `injected_requests`."""
Question = tuple[Tokens, Tokens]
"""A prompt with its true answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The answers to one `Batch`, with its place. Times are monotonic."""

    replica: str
    place: int
    began: float
    ended: float
    outputs: Sequence[Output]
    wrong_tokens: int


class Server:
    """One replica on a node, and the thread that sends it prompts.

    Records and counters are the thread's until it has ended. `in_flight` and the pid of a kill on
    purpose cross.
    """

    def __init__(
        self, name: str, *, environ: Mapping[str, str], arena_dir: Path, files: Path
    ) -> None:
        """Begin to start a replica; `files` is the path of its stalls and output, but a suffix."""
        self.name = name
        self.arena_dir = arena_dir
        self.stalls_path = Path(f"{files}.stalls")
        self.served: list[Served] = []
        self.losses: Losses = Counter()
        self.failures: list[str] = []
        self.stops: list[tuple[float, float]] = []
        """When it was stopped on purpose, in monotonic seconds."""
        self.in_flight = 0
        connector = KvConnectorConfig(
            connector_module="kvray.lab.chaos.stalls",
            connector_scheduler_class=f"TimedScheduler@{self.stalls_path}",
        )
        own = {"KVRAY_CONNECTOR__REPLICA": name, "KVRAY_ARENA__DIR": str(arena_dir)}
        env, log_path = {**environ, **own}, Path(f"{files}.log")
        self._spawn = partial(spawn, name, connector, env=env, log_path=log_path)
        self.replica = self._spawn()
        self._killed_pid = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def serve(self, batches: Iterator[tuple[int, list[Question]]]) -> None:
        """Send batch after batch from now on, until `end`; each has its place in a phase."""
        name = f"kvray-{self.name}"
        self._thread = threading.Thread(target=self._serve, args=(batches,), name=name)
        self._thread.start()

    def send(self, signum: signal.Signals) -> int | None:
        """Send SIGKILL or SIGSTOP as a fault; return the pid, or None if the replica is idle.

        One that is stopped is not stopped again: the first end would be both's.
        """
        replica = self.replica
        is_stopped = bool(self.stops) and self.stops[-1][1] == float("inf")
        if not self.in_flight or not replica.is_alive or (is_stopped and signum == signal.SIGSTOP):
            return None
        if signum == signal.SIGKILL:
            self._killed_pid = replica.pid
        else:
            self.stops.append((time.monotonic(), float("inf")))
        with contextlib.suppress(ProcessLookupError):
            os.kill(replica.pid, signum)
        return replica.pid

    def resume(self, pid: int) -> None:
        """Continue a stopped replica."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.stops[-1] = (self.stops[-1][0], time.monotonic())

    def end(self) -> None:
        """Send no more batches; the one in flight gets its answers. Twice is fine."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread; `end` was called."""
        if self._thread is not None:
            self._thread.join(_ANSWER_TIMEOUT_S + _JOIN_TIMEOUT_S)
            self._thread = None

    def close(self) -> None:
        """End thread and replica at once. Twice is fine."""
        self.end()
        self._killed_pid = self.replica.pid
        self.replica.kill()
        self.join()
        self.replica.kill()  # if the thread was just starting another one

    def _serve(self, batches: Iterator[tuple[int, list[Question]]]) -> None:
        for place, questions in batches:
            if self._stopping.is_set():
                break
            try:
                self._ask(place, questions)
            except KVRayError as error:
                self._note(error, len(questions))
                self._restart()
            finally:
                self.in_flight = 0

    def _ask(self, place: int, questions: list[Question]) -> None:
        self.replica.wait_ready()
        prompts, truths = zip(*questions, strict=True)
        began = time.monotonic()
        self.in_flight = len(prompts)
        outputs = self.replica.generate(prompts, max_tokens=MAX_TOKENS, timeout_s=_ANSWER_TIMEOUT_S)
        answers = zip(outputs, truths, strict=True)
        self.served.append(
            Served(
                replica=self.name,
                place=place,
                began=began,
                ended=time.monotonic(),
                outputs=outputs,
                wrong_tokens=sum(count_wrong(one.token_ids, truth) for one, truth in answers),
            )
        )

    def _note(self, error: KVRayError, num_requests: int) -> None:
        losses, text = self.losses, str(error)
        if self.replica.pid == self._killed_pid:
            losses["injected_deaths"] += not self._stopping.is_set()
            losses["injected_requests"] += num_requests
            return
        if "has not ended within" in text or "did not answer in time" in text:
            losses["hung_requests"] += num_requests
        elif "A forward pass failed" in text:
            losses["failed_requests"] += num_requests
        else:
            losses["engine_deaths"] += 1
        if len(self.failures) < _FAILURES_MAX:
            self.failures.append(f"{self.name}: {text}")

    def _restart(self) -> None:
        """Restart the replica, again and again until it answers or the run ends."""
        while not self._stopping.is_set():
            self.replica.kill()
            try:
                self.replica = self._spawn()
                self.replica.wait_ready()
                return
            except KVRayError as error:
                self._note(error, 0)
                self._stopping.wait(_RESTART_PAUSE_S)


def spawn(
    name: str,
    connector: KvConnectorConfig | None = None,
    *,
    env: Mapping[str, str] | None = None,
    log_path: Path | None = None,
) -> Replica:
    """Begin to start an engine; without a connector it reuses nothing."""
    return Replica(
        name,
        env=env,
        log_path=log_path,
        model="tiny:11",
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=_POOL_BLOCKS,
        connector=connector,
        enable_block_reuse=connector is not None,
        max_batch_size=_RUNNING_MAX,
        num_threads=1,
    )


Questions = dict[Ask, Question]


def ask_oracle(workload: list[Phase], advance: Callable[[int], None]) -> Questions:
    """Answer every prompt of a workload; `advance` hears how many more have been."""
    conversations, truth, questions = load.conversations_of(workload), Answers(), Questions()
    with spawn("oracle") as oracle:
        oracle.wait_ready()
        for asks in load.all_asks(workload):
            prompts = [load.prompt_of(conversations[one], turn, truth) for one, turn in asks]
            outputs = oracle.generate(prompts, max_tokens=load.MAX_TOKENS)
            for ask, prompt, output in zip(asks, prompts, outputs, strict=True):
                truth[ask] = output.token_ids
                questions[ask] = prompt, output.token_ids
            advance(len(asks))
    return questions
