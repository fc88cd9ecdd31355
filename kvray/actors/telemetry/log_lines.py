"""The form of an actor's log: one line an event, with its origin, and no endless repeats."""

import logging
import threading
from dataclasses import dataclass

_SAME_S = 600.0
"""A sentence is said again after so long, if it is still true."""
_WINDOW_S = 60.0
_LINES_MAX = 10
"""Different sentences of one place in the code in a window."""
_KEPT_MAX = 1024

_Place = tuple[str, int]


@dataclass(slots=True)
class _Said:
    """When something was said last, and how often it was not since."""

    at: float
    left_out: int = 0


@dataclass(slots=True)
class _Window:
    """The lines of one place in the code since `began`."""

    began: float
    num_lines: int = 0
    left_out: int = 0


class Quiet(logging.Filter):
    """Lets a sentence through once in a while, however often it is logged, and then says how often.

    A part looks at the world every second, and what is wrong then is wrong for hours. Tracebacks go
    with their sentences. Any thread may log.
    """

    def __init__(self) -> None:
        """Nothing was said yet."""
        super().__init__()
        self._lock = threading.Lock()
        self._said: dict[tuple[_Place, str], _Said] = {}
        self._windows: dict[_Place, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write `record`; its time is when it was made, in seconds."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return True  # the handler tells of a sentence that does not fit what goes into it
        with self._lock:
            return self._choose(record, text)

    def _choose(self, record: logging.LogRecord, text: str) -> bool:
        place = (record.pathname, record.lineno)
        said = self._said.pop((place, text), None)
        if said is not None and record.created - said.at < _SAME_S:
            said.left_out += 1
            self._said[place, text] = said
            return False
        left_out = 0 if said is None else said.left_out
        window = self._windows.get(place)
        if window is None or record.created - window.began >= _WINDOW_S:
            if window is not None:
                left_out += window.left_out
            window = self._windows[place] = _Window(record.created)
        if window.num_lines >= _LINES_MAX:
            window.left_out += 1
            return False
        window.num_lines += 1
        self._said[place, text] = _Said(record.created)
        if len(self._said) > _KEPT_MAX:
            del self._said[next(iter(self._said))]
        if left_out:
            record.msg, record.args = f"{text} ({left_out} more like it since it was said)", ()
        return True


class Lines(logging.Formatter):
    """Time, level, logger and who says it, then the sentence; tracebacks follow in their lines."""

    def __init__(self, who: str) -> None:
        """Have `who` stand before each sentence that does not begin with it."""
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._who = who

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the one line."""
        text = " ".join(record.message.split("\n"))
        record.message = text if text.startswith(self._who) else f"{self._who}: {text}"
        return super().formatMessage(record)
