"""What the answers of a round come to, and of all rounds; pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvray.lab.bench.runner import percentile
from kvray.lab.bench.serving.load import Answer, Due

Figures = dict[str, float]
"""Name -> value; what was not measured is missing."""

FASTER = ("first_token_p50_s", "first_token_p90_s", "first_token_p99_s")
MORE = ("requests_per_s", "in_time_per_s")
SUMS = ("failed", "other_text")
"""Of all rounds these are sums; all others are medians."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a workload: the requests, and each endpoint's answers."""

    requests: Sequence[Due]
    reusable: Sequence[int]
    """Tokens of each prompt that an infinite cache would have."""
    answers: Mapping[str, Sequence[Answer]]


def round_figures(one: Round, *, in_time_s: float, num_replicas: int) -> dict[str, Figures]:
    """Return the figures of each endpoint.

    Args:
        one: the round.
        in_time_s: a first token that comes later is too late.
        num_replicas: behind each endpoint; 0: those that answered.
    """
    return {
        name: {
            **_times(one.requests, answers, in_time_s),
            **_reuse(one, answers),
            **_load(one.requests, answers, num_replicas),
            "failed": sum(bool(answer.error) for answer in answers),
            "other_text": _num_other(answers, next(iter(one.answers.values()))),
        }
        for name, answers in one.answers.items()
    }


def over_rounds(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of each endpoint in all rounds: medians, and sums of what went wrong."""
    found: dict[str, Figures] = {}
    for name in rounds[0]:
        values: dict[str, list[float]] = {}
        for one in rounds:
            for figure, value in one[name].items():
                values.setdefault(figure, []).append(value)
        found[name] = {
            figure: sum(some) if figure in SUMS else statistics.median(some)
            for figure, some in values.items()
        }
    return found


def ratios(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return for each other endpoint how many times as good the first one is.

    Each is the median of the rounds' own ratios: of times the other's over the first one's, of
    rates the first one's over the other's.
    """
    first, *others = rounds[0]
    found: dict[str, Figures] = {}
    for other in others:
        found[other] = {}
        for figure in FASTER + MORE:
            pairs = [(one[first].get(figure), one[other].get(figure)) for one in rounds]
            of_rounds = [
                theirs / ours if figure in FASTER else ours / theirs
                for ours, theirs in pairs
                if ours and theirs
            ]
            if of_rounds:
                found[other][figure] = statistics.median(of_rounds)
    return found


def _times(requests: Sequence[Due], answers: Sequence[Answer], in_time_s: float) -> Figures:
    whole = [answer for answer in answers if not answer.error]
    if not whole:
        return {"requests_per_s": 0.0, "in_time_per_s": 0.0}
    seconds = max(
        due.at_s + answer.whole_s
        for due, answer in zip(requests, answers, strict=True)
        if not answer.error
    )
    times = [answer.first_token_s for answer in whole]
    return {
        **{f"first_token_p{p}_s": percentile(times, p) for p in (50, 90, 99)},
        "requests_per_s": len(whole) / seconds,
        "in_time_per_s": sum(time_s <= in_time_s for time_s in times) / seconds,
    }


def _reuse(one: Round, answers: Sequence[Answer]) -> Figures:
    """Return the share of prompt tokens that were cached, and the share that could have been."""
    known = [at for at, answer in enumerate(answers) if answer.cached_tokens is not None]
    prompt = sum(len(one.requests[at].tokens) for at in known)
    if not prompt:
        return {}
    cached = sum(answers[at].cached_tokens or 0 for at in known)
    reusable = sum(one.reusable[at] for at in known)
    found = {"cached_share": cached / prompt, "reusable_share": reusable / prompt}
    return {**found, "reuse": cached / reusable} if reusable else found


def _load(requests: Sequence[Due], answers: Sequence[Answer], num_replicas: int) -> Figures:
    """Return what the most loaded replica had, over the mean: of requests, of computed tokens."""
    counts: Counter[str] = Counter()
    computed: Counter[str] = Counter()
    for due, answer in zip(requests, answers, strict=True):
        if answer.replica:
            counts[answer.replica] += 1
            computed[answer.replica] += len(due.tokens) - (answer.cached_tokens or 0)
    if not counts:
        return {}
    number = max(num_replicas, len(counts))
    return {
        "most_requests": max(counts.values()) * number / counts.total(),
        "most_computed": max(computed.values()) * number / computed.total(),
    }


def _num_other(answers: Sequence[Answer], first: Sequence[Answer]) -> int:
    """Return how many texts differ from the first endpoint's; failed answers do not count."""
    return sum(
        ours.text != theirs.text
        for ours, theirs in zip(answers, first, strict=True)
        if not (ours.error or theirs.error)
    )
