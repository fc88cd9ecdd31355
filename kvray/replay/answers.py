"""When the answers to requests are known, which a trace does not say."""

from __future__ import annotations

import heapq

from kvray.replay.trace import Trace

_ANSWER_TOKENS_PER_S = 50.0
"""An answer is known when it has been given, at this speed."""


class Answers:
    """When the answers to requests will be known."""

    def __init__(self, trace: Trace) -> None:
        """Expect none yet."""
        self._num_tokens = trace.num_answer_tokens.tolist()
        self._due: list[tuple[float, int]] = []

    def expect(self, request: int, now: float) -> None:
        """Have the answer to a request that is made now known when it has been given."""
        if self._num_tokens[request]:
            due = now + self._num_tokens[request] / _ANSWER_TOKENS_PER_S
            heapq.heappush(self._due, (due, request))

    def until(self, now: float) -> list[tuple[int, int]]:
        """Return the requests whose answers are known since the last call, and their tokens."""
        known = []
        while self._due and self._due[0][0] <= now:
            request = heapq.heappop(self._due)[1]
            known.append((request, self._num_tokens[request]))
        return known
