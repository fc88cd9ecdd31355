"""The whole demo: model, tier, engines, phases, verdict; everything ends, however it ends."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from kvray.client import Client
from kvray.config import environ_for, format_size, load_config
from kvray.errors import ConfigError
from kvray.lab import vllm
from kvray.lab.demo.report import ORACLE, WITH_KVRAY, WITHOUT_KVRAY, Record, judge, report
from kvray.lab.report import Report
from kvray.lab.runner import Runner, is_soon
from kvray.reference import KvConnectorConfig, Replica
from kvray.reference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from kvray.reference.weights import find_weights

TOKENS_PER_BLOCK = 32
LONG_BLOCKS = 48
"""Blocks of the long prompt, which fills them exactly: the last token is the last of a block."""
UNALIGNED_BLOCKS = 22
UNALIGNED_TOKENS = 13
"""Tokens of the other long prompt after its last full block."""
SYSTEM_BLOCKS = 16
OFFLOAD_BLOCKS = 18
_OFFLOAD_TOKENS = 9

LONG, UNALIGNED = "long", "unaligned"
SAME_SYSTEM = ("question 1", "question 2", "question 3")
"""Only these prompts begin with the same block."""
OFFLOAD_A, OFFLOAD_B = "A", "B"

_CHAT = (
    "<|im_start|>system\nAnswer from this handbook in one sentence.\n\n",
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
)
"""The text before the document, and the text after it with the question."""
_PLAIN = ("", "\n\nQuestion: {question}\nAnswer:")

_ENGINES = ("reference", "vllm")
_MAX_TOKENS = 16
_THREADS_MAX = 4
_SAVED_TIMEOUT_S = 20.0
_POLL_S = 0.02
_ONE, _TWO = "replica-1", "replica-2"
_POOL_BLOCKS = LONG_BLOCKS + 2
"""The blocks of the long prompt and its answer, and one more."""
_OFFLOAD_POOL_BLOCKS = OFFLOAD_BLOCKS + 1
"""Room for one prompt of phase c with its answer, and for nothing else."""

_SMOLLM2 = "smollm2"
_SHM = Path("/dev/shm")
_ROOM = 1.1
"""Free memory that the demo asks for, in capacities: the tables, and Ray's own share."""

_PHASES = {
    "a": "one long prompt on two replicas",
    "b": "one system prompt, three questions",
    "c": "A, B, A, B on a pool for one",
    "d": "both replicas restarted",
}

Prompts = dict[str, tuple[int, ...]]


def run(runner: Runner, *, model: str, engine: str, arena: int) -> Report:
    """Play all phases on a tier of `arena` bytes; KVRayError: model, tier or engine failed."""
    began = time.monotonic()
    if engine not in _ENGINES:
        raise ConfigError(f"There is no engine {engine!r}; give one of {', '.join(_ENGINES)}.")
    if engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here; install it, or run `make test-vllm` in a checkout, which"
            " makes an environment with vLLM for the CPU."
        )
    _fetch_model(model)
    config_path = _write_config(runner, arena, model=model)
    settings = load_config(config_path, environ={})
    with runner.during("Starting Ray and the tier"):
        runner.start_tier(settings)
    # Only now: torch starts threads, and there must be none while Ray takes over the signals.
    with runner.during("Reading the model"):
        path, tokenizer = _read_model(model)
    engines = Engines(
        runner.stack.enter_context(Client(settings)),
        make_prompts(tokenizer),
        engine=engine,
        model=path,
        environ=environ_for(config_path),
    )
    runner.stack.callback(engines.close)
    for phase, title in {ORACLE: "The answers without any reuse", **_PHASES}.items():
        steps = [*_steps(engines, phase)]
        shown = title if phase == ORACLE else f"Phase {phase}: {title}"
        with runner.during(shown, len(steps)) as advance:
            for step in steps:
                step()
                advance()
    oracle = {record.prompt: record for record in engines.records if record.phase == ORACLE}
    records = [record for record in engines.records if record.phase != ORACLE]
    return report(
        records,
        judge(records, oracle=oracle),
        titles=_PHASES,
        facts={"model": model, "tokens_per_block": TOKENS_PER_BLOCK},
        seconds=time.monotonic() - began,
    )


def _is_tiny(model: str) -> bool:
    """Return whether a model is random weights, which exist in memory only."""
    return model.partition(":")[0] == "tiny"


def _fetch_model(model: str) -> None:
    """Make sure that the model is on this machine; ConfigError: it, or a package, cannot be had."""
    missing = [name for name in ("accelerate", "gguf", "transformers") if not find_spec(name)]
    if missing:
        raise ConfigError(
            f"The demo's engines need {', '.join(missing)}; run `pip install 'kvray[demo]'`."
        )
    if model == _SMOLLM2:
        find_weights()  # shows a bar if it has to download them
    elif not _is_tiny(model) and not Path(model).expanduser().exists():
        raise ConfigError(
            f"There is no model at {model}; give smollm2, tiny, or the path of a Llama-family"
            " checkpoint (a directory or a .gguf file)."
        )


def _read_model(model: str) -> tuple[str, Tokenizer]:
    """Return the name or path that engines load, and the tokenizer; ConfigError: unreadable."""
    if _is_tiny(model):
        return model, ByteTokenizer()
    path = Path(model).expanduser().absolute()
    if model == _SMOLLM2:
        from kvray.reference.checkpoint import find_smollm2  # imports torch

        path = find_smollm2()
    try:
        return str(path), load_tokenizer(path)
    except (OSError, ValueError) as error:  # transformers raises both
        raise ConfigError(f"The tokenizer at {path} cannot be read: {error}") from None


def _write_config(runner: Runner, capacity: int, *, model: str) -> Path:
    """Write the tier's configuration; its arena goes to disk where shared memory is too small."""
    scratch = runner.make_directory(Path(tempfile.gettempdir()), "TMPDIR")
    has_room = _SHM.is_dir() and shutil.disk_usage(_SHM).free >= _ROOM * capacity
    settings = {
        "cluster_name": f"demo-{os.getpid()}",
        # Two engines, a shard and Ray may share two cores: wait for a neighbour to be scheduled.
        "arena": {
            "dir": str(_SHM if has_room else scratch),
            "mount": "memory" if has_room else "any",
            "capacity": capacity,
            "lock_wait_s": 0.05,
        },
    }
    if not has_room:
        runner.say(f"{_SHM} has no room for {format_size(capacity)}; the arena goes to {scratch}.")
    if _is_tiny(model):  # random weights have no checkpoint that tells them apart
        settings["connector"] = {"model_key": model.replace(":", "-")}
    path = scratch / "kvray.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def make_prompts(tokenizer: Tokenizer) -> Prompts:
    """Cut the prompts to their exact numbers of tokens."""
    # SmolLM2's tokenizer knows the marks of a chat; others get plain text.
    begin, end = _CHAT if len(tokenizer.encode("<|im_start|>")) == 1 else _PLAIN

    text = (files("kvray.lab.demo") / "handbook.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    starts = [index for index, paragraph in enumerate(paragraphs) if len(paragraph) < 60]

    def make(chapter: int, question: str, num_blocks: int, more: int | None = 0) -> tuple[int, ...]:
        """Return a prompt with `more` tokens after its full blocks; None: with all the question."""
        asked = tokenizer.encode(end.format(question=question))
        num_tokens = num_blocks * TOKENS_PER_BLOCK + (len(asked) if more is None else more)
        # From a chapter's title on, with the chapters before it at the end.
        turned = paragraphs[starts[chapter] :] + paragraphs[: starts[chapter]]
        document = tokenizer.encode(begin + "\n\n".join(turned))[: num_tokens - len(asked)]
        assert len(document) + len(asked) == num_tokens, "the handbook is long enough"
        return (*document, *asked)

    failures = "Which failures are unfriendly, and why?"
    full_cache = "What is the worst answer to a full cache?"
    one, two, three = SAME_SYSTEM
    return {
        LONG: make(0, "What is the hard part of serving language models?", LONG_BLOCKS),
        UNALIGNED: make(3, full_cache, UNALIGNED_BLOCKS, UNALIGNED_TOKENS),
        one: make(2, "Why is a replica slow after a restart?", SYSTEM_BLOCKS, None),
        two: make(2, "What is to be done before a process is stopped?", SYSTEM_BLOCKS, None),
        three: make(2, "What does the fingerprint cover?", SYSTEM_BLOCKS, None),
        OFFLOAD_A: make(4, failures, OFFLOAD_BLOCKS, _OFFLOAD_TOKENS),
        OFFLOAD_B: make(1, "Which two clocks do users feel?", OFFLOAD_BLOCKS, _OFFLOAD_TOKENS),
    }


def shareable_tokens(num_tokens: int) -> int:
    """Return how many tokens another engine can take: full blocks, never the whole prompt."""
    return (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


class Engines:
    """Starts engines, sends them prompts, and records their answers."""

    def __init__(
        self,
        client: Client,
        prompts: Prompts,
        *,
        engine: str,
        model: str,
        environ: Mapping[str, str],
    ) -> None:
        """Begin without an engine; `environ` has the variables with which one finds the tier."""
        self.prompts = prompts
        self.records: list[Record] = []
        self._client = client
        self._engine = engine
        self._model = model
        self._environ = environ
        # Equal answers need equal numbers of threads.
        self._num_threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._replicas: dict[str, Replica] = {}

    def start(
        self, *names: str, num_blocks: int, with_kvray: bool = True, with_reuse: bool = True
    ) -> None:
        """Start engines side by side and return when all are ready."""
        for name in names:
            env = {**self._environ, "KVRAY_CONNECTOR__REPLICA": name.replace(" ", "-")}
            made: dict[str, Any]
            if self._engine == "vllm":
                env |= vllm.environ(self._num_threads)
                made = {
                    "module": vllm.MODULE,
                    "block_size": TOKENS_PER_BLOCK,
                    "num_blocks": num_blocks + 1,  # vLLM keeps one for itself
                    "max_model_len": num_blocks * TOKENS_PER_BLOCK,
                    "dtype": "float32",
                    "enable_prefix_caching": with_reuse,
                    "with_kvray": with_kvray,
                }
            else:
                made = {
                    "tokens_per_block": TOKENS_PER_BLOCK,
                    "num_blocks": num_blocks,
                    "connector": KvConnectorConfig() if with_kvray else None,
                    "enable_block_reuse": with_reuse,
                    "num_threads": self._num_threads,
                }
            self._replicas[name] = Replica(name, env=env, model=self._model, **made)
        for name in names:
            self._replicas[name].wait_ready()

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
        self.records.append(Record(phase, replica, prompt, output, expected_hit_tokens))
        if until_saved:
            computed = output.prompt_tokens - output.reused_tokens - output.hit_tokens
            num_stored = stored_before + computed // TOKENS_PER_BLOCK
            is_soon(lambda: self._num_stored() >= num_stored, _SAVED_TIMEOUT_S, poll_s=_POLL_S)

    def _num_stored(self) -> int:
        return sum(shard["arena"]["stored"] for shard in self._client.status()["shards"])


def _steps(engines: Engines, phase: str) -> Iterator[Callable[[], None]]:
    ask = partial(engines.ask, phase)
    both = partial(engines.start, _ONE, _TWO, num_blocks=_POOL_BLOCKS)
    shared = {name: shareable_tokens(len(tokens)) for name, tokens in engines.prompts.items()}
    if phase == ORACLE:  # an engine that has no connector and reuses nothing
        start = partial(engines.start, ORACLE, num_blocks=_POOL_BLOCKS)
        yield partial(start, with_kvray=False, with_reuse=False)
        for prompt in engines.prompts:
            yield partial(ask, ORACLE, prompt)
        yield partial(engines.end, ORACLE)
    elif phase == "a":  # replica 1 computes prompts, replica 2 copies their blocks
        yield both
        for prompt in (LONG, UNALIGNED):
            yield partial(ask, _ONE, prompt, expected_hit_tokens=0, until_saved=True)
            yield partial(ask, _TWO, prompt, expected_hit_tokens=shared[prompt])
    elif phase == "b":  # prompts that differ after a common beginning share the beginning
        first, second, third = SAME_SYSTEM
        yield partial(ask, _ONE, first, expected_hit_tokens=0, until_saved=True)
        yield partial(ask, _TWO, second, expected_hit_tokens=SYSTEM_BLOCKS * TOKENS_PER_BLOCK)
        yield partial(ask, _ONE, third)
    elif phase == "c":  # the pool holds one of both, without kvray and with it
        for name in (WITHOUT_KVRAY, WITH_KVRAY):
            has_tier = name == WITH_KVRAY
            start = partial(engines.start, name, num_blocks=_OFFLOAD_POOL_BLOCKS)
            yield partial(start, with_kvray=has_tier)
            for until_saved in (has_tier, False):
                for prompt in (OFFLOAD_A, OFFLOAD_B):
                    yield partial(ask, name, prompt, until_saved=until_saved)
            yield partial(engines.end, name)
    else:  # both replicas restart, and their first prompt hits at once
        yield partial(engines.end, _ONE, _TWO)
        yield both
        for replica, prompt in ((_ONE, LONG), (_TWO, UNALIGNED)):
            yield partial(ask, replica, prompt, expected_hit_tokens=shared[prompt])
        yield partial(engines.end, _ONE, _TWO)
