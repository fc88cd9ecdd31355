"""Engines of vLLM beside a tier, and the same prompts answered by one that has no connector."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import psutil

from kvray.lab.vllm import MODULE, environ
from kvray.reference.checkpoint import find_smollm2
from kvray.reference.output import Output
from kvray.reference.replica import Replica
from kvray.reference.tokenizer import load_tokenizer
from tests.kit.ray.cluster import TwoNodes

BLOCK = 32
LENGTH = 20 * BLOCK + 9
HIT = 20 * BLOCK
"""What an engine loads of a prompt of that length which another has computed."""
SETTINGS: dict[str, dict[str, Any]] = {
    "arena": {"capacity": "512MiB", "slab": "64MiB", "lock_wait_s": 0.2},
    "connector": {"model_key": "smollm2", "stage_wait_s": 5.0},
}
ENVIRON = environ(1)
OPTIONS: dict[str, Any] = {
    "block_size": BLOCK,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
}
CHANGES: dict[str, tuple[int, dict[str, Any]]] = {
    "first": (0, {}),
    "chunked": (0, {"max_num_batched_tokens": 256, "max_num_seqs": 64}),
    "uncached": (0, {"enable_prefix_caching": False}),
    "small": (0, {"num_blocks": 66}),  # one is vLLM's own
    "far": (1, {}),
    "telling": (0, {}),  # and it publishes events, see `events_at`
}
"""Name -> the number of its node, and how it differs from the one that says what is true."""
_QUESTION = 24
_END_S = 20.0
_LOG_LINES = 120
_REPORTED_S = 2.0
"""Engines report what they count once a second."""


def start(name: str, tier: TwoNodes) -> Replica:
    """Begin to start an engine; `plain` has no connector."""
    number, changes = CHANGES.get(name, (0, {}))
    if name == "telling":
        live, replay = events_at(tier)
        events = {"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replay}
        changes = {**changes, "kv_events_config": events}
    environ = {**ENVIRON, **tier.engine_environ(tier.nodes[number])}
    return Replica(
        name,
        env={**environ, "KVRAY_CONNECTOR__REPLICA": name},
        log_path=tier.machine.scratch / f"{name}.log",
        module=MODULE,
        **{**OPTIONS, **changes, "with_kvray": name != "plain"},
    )


def events_at(tier: TwoNodes) -> tuple[str, str]:
    """Return where the events of `telling` are, and their replays."""
    return f"ipc://{tier.machine.scratch}/events", f"ipc://{tier.machine.scratch}/replays"


@contextlib.contextmanager
def log_shown(name: str, tier: TwoNodes) -> Iterator[None]:
    """Print the end of an engine's log if what is done with it fails."""
    try:
        yield
    except BaseException:
        lines = (tier.machine.scratch / f"{name}.log").read_text(errors="replace").splitlines()
        print(*lines[-_LOG_LINES:], sep="\n")
        raise


def stop(engine: Replica) -> None:
    """End an engine with SIGKILL, and see that nothing of vLLM's stays."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(engine.pid).children(recursive=True)
    engine.kill()
    _, living = psutil.wait_procs(below, timeout=_END_S)
    assert living == []


class Truth:
    """What vLLM answers without a connector."""

    def __init__(self, plain: Replica) -> None:
        self._plain = plain
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        text = (files("kvray.lab.demo") / "handbook.txt").read_text(encoding="utf-8")
        self._book = load_tokenizer(find_smollm2()).encode(text)

    def of(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        """Return the answers to prompts."""
        asked = [(tuple(prompt), max_tokens) for prompt in prompts]
        new = [one for one in dict.fromkeys(asked) if one not in self._known]
        if new:
            given = [list(tokens) for tokens, _ in new]
            outputs = self._plain.generate(given, max_tokens=max_tokens)
            self._known |= {one: output.token_ids for one, output in zip(new, outputs, strict=True)}
        return [self._known[one] for one in asked]

    def prompt(self, chapter: int, length: int, *, question: int = 0) -> list[int]:
        """Return a prompt that shares all but its last 24 tokens with others of its chapter."""
        shared = self._tokens(997 * chapter, length - _QUESTION)
        return shared + self._tokens(31 * question + 5, _QUESTION)

    def _tokens(self, begin: int, count: int) -> list[int]:
        book = self._book
        return [book[(begin + index) % len(book)] for index in range(count)]


class Witness:
    """Engines by name, of which every answer is held against the truth."""

    def __init__(self, tier: TwoNodes, truth: Truth, engines: dict[str, Replica]) -> None:
        self.tier = tier
        self.prompt = truth.prompt
        self.engines = engines
        self._truth = truth

    def ask(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        salt: str | None = None,
    ) -> list[Output]:
        """Have an engine answer prompts at once; every answer is vLLM's own."""
        given = [list(prompt) for prompt in prompts]
        outputs: list[Output] = self.engines[name].generate(given, max_tokens=max_tokens, salt=salt)
        true = self._truth.of(prompts, max_tokens)
        wrong = [
            (index, output.hit_tokens, output.token_ids, expected)
            for index, (output, expected) in enumerate(zip(outputs, true, strict=True))
            if output.token_ids != expected
        ]
        assert wrong == []
        return outputs

    def counters(self, name: str) -> dict[str, int]:
        """Return what an engine has counted, both halves together."""
        time.sleep(_REPORTED_S)
        totals: Counter[str] = Counter()
        for shard in self.tier.shards():
            for rank in shard.get("replicas", ()):
                if rank["replica"] == name:
                    totals.update(rank["counters"])
        return totals
