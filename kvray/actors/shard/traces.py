"""Which trace the requests of a node's replicas belong to; state of the shard's event loop.

Of a request an engine's connector sees tokens and a number, and no header. So whoever prefetches a
prompt for a replica names the prompt's trace here, and the engine's notes say by which key they
mean it. Of two equal prompts for one replica the one that came first is meant first.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvray.actors.staging.replicas import Origin
from kvray.trace import spans
from kvray.trace.span_note import SpanNote

_PROMPTS_MAX = 4096
_ALIKE_MAX = 64  # equal prompts for one replica that its engine has not seen yet
_REQUESTS_MAX = 8192
_EXPECTED_S = 600.0
"""A prompt that its engine has not seen by then never comes."""
_LATE_MAX = 1024
_LATE_S = 5.0
"""A rank may report its load before the leader reports the promise, each once a second."""


class _Expected(NamedTuple):
    at: float
    traceparent: str


def outcome_of(staged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span for the answer of a stage."""
    return {"kvray.blocks": staged["num_blocks"], "kvray.miss.reason": staged["reason"]}


class Traces:
    """Makes spans of engines' notes, for the prompts whose traces it was told."""

    def __init__(self) -> None:
        self._expected: OrderedDict[tuple[str, bytes], deque[_Expected]] = OrderedDict()
        """Replica and last key of a prompt -> the traces of requests to come."""
        self._requests: OrderedDict[tuple[str, int], tuple[bytes, str]] = OrderedDict()
        """Replica and request -> the last key of its prompt, and its trace."""
        self._late: deque[tuple[float, Origin, SpanNote]] = deque(maxlen=_LATE_MAX)

    def expect(self, replica: str, key: bytes, traceparent: str) -> None:
        """Know that a prompt of that last key comes to a replica, as part of a trace."""
        alike = self._expected.setdefault((replica, key), deque(maxlen=_ALIKE_MAX))
        alike.append(_Expected(time.time(), traceparent))
        self._expected.move_to_end((replica, key))
        if len(self._expected) > _PROMPTS_MAX:
            self._expected.popitem(last=False)

    def of_prompt(self, replica: str, key: bytes) -> str:
        """Return the trace of the next request with a prompt; empty: it has none."""
        alike = self._alike(replica, key)
        return alike[0].traceparent if alike else ""

    def note(self, origin: Origin, notes: Iterable[SpanNote]) -> None:
        """Make spans of what a rank reports; notes on requests without a trace are dropped."""
        now = time.time()
        late, self._late = self._late, deque(maxlen=_LATE_MAX)
        for at, where, one in (*((now, origin, one) for one in notes), *late):
            parent = self._trace_of(where.replica, one)
            if parent is None:
                if at > now - _LATE_S:
                    self._late.append((at, where, one))
            elif parent:
                about = {
                    "kvray.replica": where.replica,
                    "kvray.rank": where.rank,
                    "kvray.request.id": one.request_id,
                    **one.attributes,
                }
                spans.past_span(one.name, parent, one.began, one.ended, about, error=one.error)

    def _trace_of(self, replica: str, note: SpanNote) -> str | None:
        """Return the trace of a note's request; its first promise finds it by the prompt.

        It is empty for a request without one, and None before its first promise. An engine that was
        started again may use a number again, hardly for the same prompt.
        """
        request = replica, note.request_id
        key, known = self._requests.get(request, (b"", None))
        if note.key in (b"", key):
            return known
        alike = self._alike(replica, note.key)
        is_meant = bool(alike) and alike[0].at <= note.ended
        traceparent = alike.popleft().traceparent if is_meant else ""
        self._requests[request] = note.key, traceparent
        if len(self._requests) > _REQUESTS_MAX:
            self._requests.popitem(last=False)
        return traceparent

    def _alike(self, replica: str, key: bytes) -> deque[_Expected]:
        """Return the requests with one prompt that are still to come; forget those that are not."""
        alike = self._expected.get((replica, key))
        while alike and alike[0].at < time.time() - _EXPECTED_S:
            alike.popleft()
        if alike is not None and not alike:
            del self._expected[replica, key]
        return alike or deque()
