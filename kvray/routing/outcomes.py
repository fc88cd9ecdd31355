"""How a router's choices turned out, as totals of declared metrics; pure."""

from bisect import bisect_left
from collections import Counter
from typing import Literal

from kvray.metrics import FIRST_TOKENS
from kvray.routing.choice import REASONS, Reason

SurveyOutcome = Literal["answered", "failed", "skipped"]
_SURVEY_OUTCOMES: tuple[SurveyOutcome, ...] = ("answered", "failed", "skipped")

_BOUNDS_S = (*(2.0**bits for bits in range(-9, 9)), float("inf"))
"""Where the buckets end: 2 ms to 256 s."""


class Outcomes:
    """Counts; written by one thread and read by another."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._surveys: Counter[str] = Counter(dict.fromkeys(_SURVEY_OUTCOMES, 0))
        self._times = {noun: _Times() for noun in FIRST_TOKENS}
        self._predicted_s = 0.0

    def surveyed(self, outcome: SurveyOutcome) -> None:
        """Count a question to the tier."""
        self._surveys[outcome] += 1

    def sent(self, reason: Reason) -> None:
        """Count a request that went to a replica."""
        self._reasons[reason] += 1

    def first_token(self, real_s: float, predicted_s: float | None) -> None:
        """Count a first token; None: nobody had predicted it."""
        self._times["first_token"].observe(real_s)
        if predicted_s is not None:
            self._times["first_token_error"].observe(abs(real_s - predicted_s))
            self._predicted_s += predicted_s

    def totals(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return metric without `kvray_`, and its labels -> the total."""
        made: dict[tuple[str, tuple[str, ...]], float] = {}
        made |= {("routed_requests_total", (name,)): n for name, n in self._reasons.items()}
        made |= {("router_surveys_total", (name,)): n for name, n in self._surveys.items()}
        made["predicted_first_token_seconds_sum_total", ()] = self._predicted_s
        for noun, times in self._times.items():
            below = 0
            for bound, count in zip(_BOUNDS_S, times.buckets, strict=True):
                below += count
                le = "+Inf" if bound == float("inf") else f"{bound:.9f}".rstrip("0").rstrip(".")
                made[f"{noun}_seconds_bucket_total", (le,)] = below
            made[f"{noun}_count_total", ()] = below
            made[f"{noun}_seconds_sum_total", ()] = times.sum_s
        return made


class _Times:
    def __init__(self) -> None:
        self.buckets = [0] * len(_BOUNDS_S)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
