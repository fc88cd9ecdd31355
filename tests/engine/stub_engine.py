"""An engine without a model behind a replica's pipe: it says one token until it is told to stop."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from kvray.errors import ConfigError
from kvray.reference.output import Call, Output
from kvray.reference.replica_child import serve

TOKEN = 7


class StubEngine:
    """Answers every prompt alike; a `sentence` is why it does not start."""

    def __init__(self, sentence: str = "") -> None:
        if sentence:
            raise ConfigError(sentence)
        self._ids = itertools.count(1)
        self._cancelled: set[int] = set()

    def submit(self, prompt: Any, *, max_tokens: int, salt: str | None) -> Call:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; it must be at least 1.")
        call = Call(call_id=next(self._ids))
        arguments = (call, len(prompt), max_tokens)
        threading.Thread(target=self._answer, args=arguments, daemon=True).start()
        return call

    def cancel(self, call: Call) -> None:
        self._cancelled.add(call.call_id)

    def close(self) -> None:
        """End with the process."""

    def _answer(self, call: Call, prompt_tokens: int, max_tokens: int) -> None:
        said: list[int] = []
        while len(said) < max_tokens and call.call_id not in self._cancelled:
            said.append(TOKEN)
            time.sleep(0.005)
        output = Output(
            text="",
            token_ids=tuple(said),
            prompt_tokens=prompt_tokens,
            reused_tokens=0,
            hit_tokens=0,
            ttft_s=0.0,
            finish_reason="length" if len(said) == max_tokens else "cancelled",
        )
        call.future.set_result(output)


if __name__ == "__main__":
    serve(StubEngine)
