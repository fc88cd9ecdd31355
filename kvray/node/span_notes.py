"""Notes on what took time for the requests of one rank; the shard makes spans of them."""

from collections import deque

from kvray.trace.span_note import SPAN_NOTES_MAX, SpanNote

_WAITING_MAX = 4000


class SpanNotes:
    """The latest notes of one rank.

    The engine's thread notes while `is_on`; the link's thread says whether the shard makes spans,
    and takes what it reports. A deque crosses, which drops the oldest beyond its bound.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._waiting: deque[SpanNote] = deque(maxlen=_WAITING_MAX)

    def note(self, note: SpanNote) -> None:
        """Note what took time."""
        self._waiting.append(note)

    def take(self) -> list[SpanNote]:
        """Take the notes to report next, the oldest first; a report that fails loses them."""
        return [self._waiting.popleft() for _ in range(min(SPAN_NOTES_MAX, len(self._waiting)))]
