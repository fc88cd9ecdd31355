"""Engines of vLLM beside a tier, and the same prompts answered by one that has no connector."""

import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from kvray.lab.reference.checkpoint import find_smollm2
from kvray.lab.reference.output import Output
from kvray.lab.reference.replica import Replica
from kvray.lab.reference.tokenizer import load_tokenizer
from tests.ray.cluster import TwoNodes, wait_for

BLOCK = 32
SETTINGS: dict[str, dict[str, Any]] = {
    "arena": {"capacity": "512MiB", "slab": "64MiB", "lock_wait_s": 0.2},
    "connector": {"model_key": "smollm2", "stage_wait_s": 5.0},
}
MODULE = "kvray.lab.vllm.engine"
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # equal answers need equal numbers of threads
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS: dict[str, Any] = {
    "block_size": BLOCK,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "first": (0, {}),
    "chunked": (0, {"max_num_batched_tokens": 256, "max_num_seqs": 64}),
    "uncached": (0, {"enable_prefix_caching": False}),
    "small": (0, {"num_blocks": 40, "max_model_len": 1024}),
    "far": (1, {}),
}
"""Name -> the number of its node, and how it differs from the one that says what is true."""
START_S = 400.0
_QUESTION = 24


class Witness:
    """The tier, its engines by name, and what is true."""

    def __init__(self, tier: TwoNodes) -> None:
        self.tier = tier
        self._engines: dict[str, Replica] = {}
        self._true: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        text = (files("kvray.lab.demo") / "handbook.txt").read_text(encoding="utf-8")
        self._book = load_tokenizer(find_smollm2()).encode(text)

    def prompt(self, chapter: int, length: int, *, question: int = 0) -> list[int]:
        """Return a prompt that shares all but its last 24 tokens with others of its chapter."""
        shared = self._tokens(997 * chapter, length - _QUESTION)
        return shared + self._tokens(31 * question + 5, _QUESTION)

    def _tokens(self, start: int, count: int) -> list[int]:
        book = self._book
        return [book[(start + index) % len(book)] for index in range(count)]

    def engine(self, name: str) -> Replica:
        """Return an engine, started if it is not running; `plain` has no connector."""
        running = self._engines.get(name)
        if running is not None and running.is_alive:
            return running
        if running is not None:
            running.kill()
        number, changes = ENGINES.get(name, (0, {}))
        node = self.tier.nodes[number]
        environ = {**ENVIRON, **self.tier.engine_environ(node), "KVRAY_CONNECTOR__REPLICA": name}
        options = {**OPTIONS, **changes, "with_kvray": name != "plain"}
        engine = Replica.spawn(name, env=environ, module=MODULE, **options)
        self._engines[name] = engine
        engine.wait_ready(START_S)
        return engine

    def true(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        """Return vLLM's own answers."""
        asked = [(tuple(prompt), max_tokens) for prompt in prompts]
        new = [one for one in dict.fromkeys(asked) if one not in self._true]
        if new:
            outputs = self.engine("plain").generate(
                [list(tokens) for tokens, _ in new], max_tokens=max_tokens
            )
            for one, output in zip(new, outputs, strict=True):
                self._true[one] = output.token_ids
        return [self._true[one] for one in asked]

    def ask(
        self, name: str, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16
    ) -> list[Output]:
        """Have an engine answer prompts at once; every answer is vLLM's own."""
        outputs: list[Output] = self.engine(name).generate(
            [list(prompt) for prompt in prompts], max_tokens=max_tokens
        )
        self.check(prompts, outputs, max_tokens)
        return outputs

    def check(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Output], max_tokens: int
    ) -> None:
        """Compare answers with vLLM's own, token by token."""
        true = self.true(prompts, max_tokens)
        wrong = [
            (index, output.hit_tokens, output.token_ids, expected)
            for index, (output, expected) in enumerate(zip(outputs, true, strict=True))
            if output.token_ids != expected
        ]
        assert wrong == []

    def stored(self) -> int:
        """Return how many blocks the shards have in memory."""
        return sum(one["arena"]["stored"] for one in self.tier.shards() if "arena" in one)

    def wait_until_stored(self, more_than: int) -> None:
        """Return when the shards have more blocks than that."""
        wait_for(lambda: self.stored() > more_than, "storing", timeout_s=30)

    def counters(self, name: str) -> dict[str, int]:
        """Return what an engine has counted, both halves together, a second from now."""
        time.sleep(2.0)
        totals: dict[str, int] = {}
        for shard in self.tier.shards():
            for rank in shard.get("replicas", ()):
                if rank["replica"] == name:
                    for key, value in rank["counters"].items():
                        totals[key] = totals.get(key, 0) + value
        return totals

    def kill(self, name: str) -> None:
        """End an engine with SIGKILL."""
        self._engines.pop(name).kill()

    def close(self) -> None:
        """End all engines."""
        while self._engines:
            self._engines.popitem()[1].kill()
