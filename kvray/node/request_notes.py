"""Notes on the requests of one rank, for the shard, which keeps them for people."""

import contextlib
from collections import OrderedDict, deque

from kvray.trace.request_note import NOTES_MAX, RequestNote, pack

_WAITING_MAX = 512
_SAID_MAX = 2048


class RequestNotes:
    """The latest requests of one rank.

    The engine's thread notes, in about a microsecond and without a lock; the link's thread takes
    and reports. Both use `_waiting`, a deque that drops the oldest beyond its bound.
    """

    def __init__(self) -> None:
        self._waiting: deque[RequestNote] = deque(maxlen=_WAITING_MAX)
        self._said: OrderedDict[int, tuple[int, int, str]] = OrderedDict()
        """Request -> its last note: a full engine asks again in every pass."""

    def note(self, note: RequestNote) -> bool:
        """Note the outcome of a request, unless it is the last one again; return whether it was."""
        came = note.first, note.end, note.reason
        if self._said.get(note.request_id) == came:
            return False
        self._said[note.request_id] = came
        if len(self._said) > _SAID_MAX:
            self._said.popitem(last=False)
        self._waiting.append(note)
        return True

    def take(self) -> list[RequestNote]:
        """Take the notes to report next, the oldest first."""
        count = min(NOTES_MAX, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def give_back(self, notes: list[RequestNote]) -> None:
        """Put `notes` back, as far as there is room."""
        room = _WAITING_MAX - len(self._waiting)
        self._waiting.extendleft(reversed(notes[max(0, len(notes) - room) :]))


def packed(notes: list[RequestNote]) -> list[bytes]:
    """Return notes in a report's form, without request numbers that no frame carries."""
    found = []
    for note in notes:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found.append(pack(note))
    return found
