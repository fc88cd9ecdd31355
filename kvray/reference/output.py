"""A prompt under way and its answer; free of torch, for processes that only drive replicas."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvray.errors import KVRayError

Prompt: TypeAlias = str | Sequence[int]

Listener: TypeAlias = Callable[[list[int]], None]
"""Called with an answer's new tokens on the engine's thread: it must neither wait nor raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to one prompt.

    The engine found `reused_tokens` in its own pool, loaded `hit_tokens` through the connector, and
    computed the rest of the `prompt_tokens`. `ttft_s` runs from the submission to the first token,
    waiting included. `finish_reason` is `stop`, `length` or `cancelled`. The engine drafted
    `drafted_tokens`, of which `accepted_tokens` are in the answer.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    hit_tokens: int
    ttft_s: float
    finish_reason: str
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A prompt that an engine answers; the listener hears the tokens before the future resolves."""

    call_id: int
    listener: Listener | None = None
    future: Future[Output] = field(default_factory=Future)
    num_heard: int = 0  # tokens that the listener has heard from an engine of this process

    def __post_init__(self) -> None:
        # Only the answer ends the future from now on: `cancel` on it does nothing.
        self.future.set_running_or_notify_cancel()

    def result(self, timeout_s: float = 600.0) -> Output:
        """Wait for the output; KVRayError if request or engine failed, or time is up."""
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            raise KVRayError(
                f"Request {self.call_id} has not ended within {timeout_s:.0f} s."
            ) from None


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
