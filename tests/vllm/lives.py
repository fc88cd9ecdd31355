"""Random lives of requests in one vLLM: shared prefixes, aborts, resets, preemption.

A process of its own, which runs vLLM's core itself, step by step: `python -m tests.vllm.lives` with
a `Life` as JSON. Its last line is its `Tally`. A small model of random weights makes thousands of
answers a minute.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvray.lab.vllm import environ
from kvray.vllm import CONNECTOR

BLOCK = 32
VOCABULARY = 512
NUM_CHAPTERS, CHAPTER_BLOCKS = 10, 8
NUM_PROMPTS = 120
_STUCK_S = 300.0
"""No vLLM goes without an answer for so long while it makes steps."""
_LINE = "lives: "

Prompt = tuple[tuple[int, ...], int]
"""Tokens, and how many are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What one engine goes through."""

    model: str
    truth: str
    """File of the answers by prompt; an engine without the connector writes it."""
    num_answers: int = 0
    seed: int = 0
    together: int = 10
    policy: str = "fail"
    reset_share: float = 0.0  # steps after which all running requests are preempted
    abort_share: float = 0.0  # requests that are given up
    logprobs_share: float = 0.0  # requests that want logprobs of their prompt
    salts: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the requests of a life."""

    answers: int = 0
    aborted: int = 0
    hit_tokens: int = 0
    resets: int = 0
    wrong: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    overcounted: list[Any] = field(default_factory=list)
    """Requests that are said to have had more from the tier than their prompt has."""
    hung: int = 0
    seconds: float = 0.0


def write_model(directory: Path, *, head_dim: int = 32) -> Path:
    """Write a Llama whose answers depend on all of their prompt, and whose heads two can share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        intermediate_size=8 * head_dim,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def prompts() -> list[Prompt]:
    """Return prompts that share prefixes with each other; always the same."""
    chance = random.Random(7)
    chapters = [
        [chance.randrange(3, VOCABULARY) for _ in range(CHAPTER_BLOCKS * BLOCK)]
        for _ in range(NUM_CHAPTERS)
    ]
    made = []
    for _ in range(NUM_PROMPTS):
        shared = chance.choice(chapters)[: chance.randrange(CHAPTER_BLOCKS * BLOCK)]
        own = [chance.randrange(3, VOCABULARY) for _ in range(chance.randrange(1, 40))]
        made.append((tuple(shared + own), chance.randrange(4, 24)))
    return made


def spawn(life: Life, log: Path, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Begin a life; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.lives", json.dumps(asdict(life))],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ(1), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env},
        )


def tally_in(log: Path) -> Tally:
    """Return what a life said at its end; if that is nothing, fail with the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    told = [line.removeprefix(_LINE) for line in lines if line.startswith(_LINE)]
    assert told, "\n".join(lines[-60:])
    # Another thread's log may stand behind it in the same line.
    return Tally(**json.JSONDecoder().raw_decode(told[-1])[0])


def _engine(life: Life) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": life.together,
        "num_gpu_blocks_override": 200,
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        **life.options,
    }
    if life.num_answers:
        options["kv_transfer_config"] = {**CONNECTOR, "kv_load_failure_policy": life.policy}
    return LLMEngine.from_engine_args(EngineArgs(model=life.model, **options))


def _truth(life: Life, engine: Any) -> None:
    """Write what an engine without the connector answers."""
    from vllm import SamplingParams

    for number, (tokens, count) in enumerate(prompts()):
        sampling = SamplingParams(max_tokens=count, temperature=0.0, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": list(tokens)}, sampling)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for one in engine.step():
            if one.finished:
                answers[one.request_id] = list(one.outputs[0].token_ids)
    Path(life.truth).write_text(json.dumps(answers))


def _live(life: Life, engine: Any) -> Tally:
    from vllm import SamplingParams

    chance, tally, all_prompts = random.Random(life.seed), Tally(), prompts()
    truth = {int(number): one for number, one in json.loads(Path(life.truth).read_text()).items()}
    running: dict[str, int] = {}  # request -> its prompt
    begun, began, progress_at = 0, time.monotonic(), time.monotonic()
    while (begun < life.num_answers or running) and not tally.hung:
        while begun < life.num_answers and len(running) < life.together:
            number, name = chance.randrange(len(all_prompts)), f"r{begun}"
            tokens, count = all_prompts[number]
            asked: dict[str, Any] = {"prompt_token_ids": list(tokens)}
            if life.salts > 1:
                asked["cache_salt"] = f"salt {chance.randrange(life.salts)}"
            sampling = SamplingParams(
                max_tokens=count,
                temperature=0.0,
                detokenize=False,
                prompt_logprobs=1 if chance.random() < life.logprobs_share else None,
            )
            engine.add_request(name, asked, sampling)
            running[name] = number
            begun += 1
        for one in engine.step():
            number, answer = running.get(one.request_id, 0), one.outputs[0]
            if not one.finished or one.request_id not in running:
                continue
            del running[one.request_id]
            progress_at = time.monotonic()
            hits = (one.kv_transfer_params or {}).get("kvray_hit_tokens", 0)
            tally.hit_tokens += hits
            if answer.finish_reason not in ("length", "stop"):
                tally.errors.append([one.request_id, str(answer.finish_reason)])
                continue
            tally.answers += 1
            got, num_tokens = list(answer.token_ids), len(all_prompts[number][0])
            if got != truth[number]:
                tally.wrong.append([one.request_id, number, hits, got, truth[number]])
            if hits >= num_tokens:
                tally.overcounted.append([one.request_id, hits, num_tokens])
        if running and chance.random() < life.abort_share:
            name = chance.choice(sorted(running))
            engine.abort_request([name])
            del running[name]
            tally.aborted += 1
        if chance.random() < life.reset_share:
            engine.reset_prefix_cache(reset_running_requests=True)
            tally.resets += 1
        tally.hung = len(running) if time.monotonic() - progress_at > _STUCK_S else 0
    tally.seconds = time.monotonic() - began
    return tally


def _main() -> None:
    life = Life(**json.loads(sys.argv[1]))
    engine = _engine(life)
    if life.num_answers:
        print(_LINE + json.dumps(asdict(_live(life, engine))), flush=True)
    else:
        _truth(life, engine)
        print(_LINE + json.dumps(asdict(Tally())), flush=True)
    os._exit(0)  # whatever vLLM still has open ends with it


if __name__ == "__main__":
    _main()
