"""The form of an actor's log: one line an event, with its origin, and no endless repeats."""

import logging
import threading
from dataclasses import dataclass

_SAME_S = 600.0
"""A part says a sentence again after so long, if it is still true."""
_WINDOW_S = 60.0
_LINES_MAX = 10
"""Different sentences of one place in the code in a window."""
_KEPT_MAX = 1024


@dataclass(slots=True)
class _Count:
    """The lines since `began`, and how many were left out."""

    began: float
    num_lines: int = 0
    left_out: int = 0


class Quiet(logging.Filter):
    """Lets a sentence through once in a while, with the number of its repeats.

    A part looks at the world every second, and a fault may last for hours. A traceback goes with
    its sentence. Any thread may log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # A place in the code with a sentence, or without one: all sentences of that place.
        self._counts: dict[tuple[str, int, str | None], _Count] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write `record`, by the time of its making."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return True  # the handler reports a sentence that does not fit its values
        with self._lock:
            return self._choose(record, text)

    def _choose(self, record: logging.LogRecord, text: str) -> bool:
        counts, left_out = [], 0
        for sentence, lines_max, period_s in ((text, 1, _SAME_S), (None, _LINES_MAX, _WINDOW_S)):
            key = record.pathname, record.lineno, sentence
            count = self._counts.pop(key, None)
            if count is None or record.created - count.began >= period_s:
                left_out += 0 if count is None else count.left_out
                count = _Count(record.created)
            self._counts[key] = count
            if len(self._counts) > _KEPT_MAX:
                del self._counts[next(iter(self._counts))]
            if count.num_lines >= lines_max:
                count.left_out += 1
                return False
            counts.append(count)
        for count in counts:
            count.num_lines += 1
        if left_out:
            record.msg, record.args = f"{text} ({left_out} more like it since it was said)", ()
        return True


class Lines(logging.Formatter):
    """Time, level, logger, tier and who says it, then the sentence, and a traceback's lines."""

    def __init__(self, tier: str, who: str) -> None:
        """Put `tier` before each sentence, and `who` if it does not begin with that."""
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._tier = tier
        self._who = who

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the one line."""
        text = " ".join(record.message.split("\n"))
        said = text if text.startswith(self._who) else f"{self._who}: {text}"
        record.message = f"{self._tier}/{said}"
        return super().formatMessage(record)
