"""The answer to a prompt; free of torch, for processes that only drive replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Prompt: TypeAlias = "str | Sequence[int]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to one prompt.

    The engine found `reused_tokens` in its own pool, loaded `hit_tokens` through the connector, and
    computed the rest of the `prompt_tokens`. `ttft_s` runs from the submission to the first token,
    waiting included. `finish_reason` is `stop`, `length` or `cancelled`.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    hit_tokens: int
    ttft_s: float
    finish_reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))  # JSON has lists only


def batch_of(prompts: Any) -> tuple[list[Prompt], bool]:
    """Return one prompt (text or token ids), or several, as a list, and whether it was one."""
    is_text = isinstance(prompts, str)
    if not is_text and prompts and all(isinstance(item, Sequence) for item in prompts):
        return list(prompts), False
    return [prompts], True


def count_wrong(answer: Sequence[int], truth: Sequence[int]) -> int:
    """Return how many tokens of an answer differ, missing and surplus ones included."""
    differing = sum(mine != true for mine, true in zip(answer, truth, strict=False))
    return differing + abs(len(answer) - len(truth))
