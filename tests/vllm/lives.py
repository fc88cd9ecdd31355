"""Random lives of vLLM's requests: shared prefixes, aborts, preemption, and a tier that is hurt.

A small model of random weights makes thousands of answers a minute. Every answer is held against
that of a vLLM without the connector.
"""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvray.errors import KVRayError
from kvray.lab.reference.output import Call
from kvray.lab.reference.replica import Replica
from kvray.lab.vllm import MODULE, environ

BLOCK = 16
NUM_CHAPTERS = 12
CHAPTER_TOKENS = 14 * BLOCK
NUM_PROMPTS = 150
ANSWERS = (6, 24)
VOCABULARY = 512
_HANGS_S = 240.0
_TOGETHER = 12

Prompt = tuple[tuple[int, ...], int]
"""Tokens, and how many are wanted."""


def write_model(directory: Path) -> Path:
    """Write a Llama whose answers depend on all of their prompt."""
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def begin(name: str, model: Path, log: Path, **options: Any) -> Replica:
    """Begin to start an engine on the tier that the environment names; `plain` has none."""
    variables = {"KVRAY_CONNECTOR__REPLICA": name.replace(" ", "-"), **options.pop("env", {})}
    return Replica.spawn(
        name,
        env={**environ(1), **variables},
        log_path=log,
        module=MODULE,
        model=str(model),
        **{
            "with_kvray": not name.startswith("plain"),
            "skip_tokenizer_init": True,
            "block_size": BLOCK,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": _TOGETHER,
            "num_blocks": 512,
            **options,
        },
    )


def prompts_of(seed: int) -> list[Prompt]:
    """Return prompts that share prefixes with each other."""
    chance = random.Random(seed)
    chapters = [
        [chance.randrange(3, VOCABULARY) for _ in range(CHAPTER_TOKENS)]
        for _ in range(NUM_CHAPTERS)
    ]
    made = []
    for _ in range(NUM_PROMPTS):
        chapter = chance.choice(chapters)
        own = [chance.randrange(3, VOCABULARY) for _ in range(chance.randrange(1, 40))]
        made.append(
            (tuple(chapter[: chance.randrange(CHAPTER_TOKENS)] + own), chance.randrange(*ANSWERS))
        )
    return made


def answers_of(plain: Replica, prompts: Sequence[Prompt]) -> dict[Prompt, tuple[int, ...]]:
    """Return what vLLM answers without the connector."""
    found = {}
    calls = [(one, plain.submit(list(one[0]), max_tokens=one[1])) for one in prompts]
    for one, call in calls:
        found[one] = call.result(_HANGS_S).token_ids
    return found


@dataclass(slots=True)
class Tally:
    """What became of the requests of some lives."""

    answers: int = 0
    cancelled: int = 0
    hit_tokens: int = 0
    wrong: list[tuple[Any, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    engines: Counter[str] = field(default_factory=Counter)


def live(
    engine: Replica,
    truth: dict[Prompt, tuple[int, ...]],
    num_answers: int,
    *,
    seed: int,
    tally: Tally,
    abort_share: float = 0.05,
    salts: Sequence[str | None] = (None,),
) -> None:
    """Have an engine answer random prompts, some at a time; add what came of it to `tally`."""
    chance, prompts = random.Random(seed), list(truth)
    open_calls: list[tuple[Prompt, Call, bool]] = []
    left = num_answers
    while left or open_calls:
        while left and len(open_calls) < _TOGETHER:
            one, is_aborted = chance.choice(prompts), chance.random() < abort_share
            try:
                call = engine.submit(list(one[0]), max_tokens=one[1], salt=chance.choice(salts))
            except KVRayError as error:  # it is gone
                tally.errors.append(str(error))
                return
            left -= 1
            if is_aborted:
                threading.Timer(chance.random() * 0.2, engine.cancel, [call]).start()
            open_calls.append((one, call, is_aborted))
        one, call, is_aborted = open_calls.pop(0)
        try:
            output = call.result(_HANGS_S)
        except KVRayError as error:
            tally.errors.append(str(error))
            continue
        expected = truth[one]
        if is_aborted and output.token_ids != expected:
            tally.cancelled += 1
            expected = expected[: len(output.token_ids)]
        else:
            tally.answers += 1
        tally.hit_tokens += output.hit_tokens
        if output.hit_tokens > output.prompt_tokens:
            tally.wrong.append((engine.name, "hits", output.hit_tokens, output.prompt_tokens))
        if output.token_ids != expected:
            tally.wrong.append((engine.name, output.hit_tokens, output.token_ids, expected))


@contextlib.contextmanager
def beside(attack: Callable[[random.Random], None], *, every_s: float) -> Iterator[None]:
    """Attack the tier again and again for the time of a block."""
    ending, chance = threading.Event(), random.Random(5)

    def run() -> None:
        while not ending.wait(every_s):
            attack(chance)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
