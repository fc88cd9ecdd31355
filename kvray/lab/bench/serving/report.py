"""The figures of the answers of a round, and of all rounds, and the report of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvray.console.output import blank_figure, empty_table
from kvray.lab.bench.serving.load import Answer, Due
from kvray.lab.report import Report, machine_facts
from kvray.lab.runner import percentile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = dict[str, float]
"""Name -> value; what was not measured is missing."""

FASTER = ("first_token_p50_s", "first_token_p90_s", "first_token_p99_s")
MORE = ("requests_per_s", "in_time_per_s")
SUMS = ("failed", "other_text")
"""Of all rounds these are sums; all others are medians."""
_ROWS = {
    "first_token_p50_s": ("first token, median", "{:.3f} s"),
    "first_token_p90_s": ("    90th percentile", "{:.3f} s"),
    "first_token_p99_s": ("    99th percentile", "{:.3f} s"),
    "requests_per_s": ("requests per second", "{:.3f}"),
    "in_time_per_s": ("    with a first token in time", "{:.3f}"),
    "cached_share": ("prompt tokens cached", "{:.1%}"),
    "reusable_share": ("    an infinite cache", "{:.1%}"),
    "reuse": ("    of what it would have", "{:.1%}"),
    "most_requests": ("requests of a replica, most over mean", "{:.2f}"),
    "most_computed": ("    tokens that it computed", "{:.2f}"),
    "failed": ("failed requests", "{:.0f}"),
    "other_text": ("texts unlike the first endpoint's", "{:.0f}"),
}
"""Figure -> its title, and how it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a workload: the requests, and each endpoint's answers."""

    requests: Sequence[Due]
    reusable: Sequence[int]
    """Tokens of each prompt that an infinite cache would have."""
    answers: Mapping[str, Sequence[Answer]]


def round_figures(one: Round, *, in_time_s: float, num_replicas: int) -> dict[str, Figures]:
    """Return the figures of each endpoint; `num_replicas` 0: those that answered."""
    first = next(iter(one.answers.values()))
    return {
        name: {
            **_time_figures(one.requests, answers, in_time_s),
            **_reuse(one, answers),
            **_load(one.requests, answers, num_replicas),
            "failed": sum(bool(answer.error) for answer in answers),
            "other_text": sum(  # failed answers do not count
                ours.text != theirs.text
                for ours, theirs in zip(answers, first, strict=True)
                if not (ours.error or theirs.error)
            ),
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
    """Return how many times as good the first endpoint is as each other: medians of rounds."""
    first, *others = rounds[0]
    found: dict[str, Figures] = {other: {} for other in others}
    for other in others:
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


def _time_figures(requests: Sequence[Due], answers: Sequence[Answer], in_time_s: float) -> Figures:
    if all(answer.error for answer in answers):
        return {"requests_per_s": 0.0, "in_time_per_s": 0.0}
    # One that failed never came: an endpoint that answers a few requests must not look fast.
    times = [math.inf if answer.error else answer.first_token_s for answer in answers]
    percentiles = {f"first_token_p{p}_s": percentile(times, p) for p in (50, 90, 99)}
    seconds = max(due.at_s + one.whole_s for due, one in zip(requests, answers, strict=True))
    return {
        **{name: found for name, found in percentiles.items() if math.isfinite(found)},
        "requests_per_s": sum(map(math.isfinite, times)) / seconds,
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
            if answer.cached_tokens is not None:
                computed[answer.replica] += len(due.tokens) - answer.cached_tokens
    if not counts:
        return {}
    number = max(num_replicas, len(counts))
    return {
        figure: max(of_replicas.values()) * number / of_replicas.total()
        for figure, of_replicas in (("most_requests", counts), ("most_computed", computed))
        if of_replicas.total()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One workload."""

    name: str
    rounds: Sequence[Mapping[str, Figures]]
    """Figures of each endpoint, one a round."""
    first_tokens: Mapping[str, Sequence[float]]
    """Endpoint -> the seconds of all answers."""
    errors: Mapping[str, Sequence[str]]
    """Endpoint -> what went wrong, each sentence once."""

    @classmethod
    def of(
        cls, name: str, rounds: Sequence[Round], *, in_time_s: float, num_replicas: int
    ) -> Section:
        """Return the section of a workload's rounds; arguments as of `round_figures`."""
        limits: dict[str, Any] = {"in_time_s": in_time_s, "num_replicas": num_replicas}
        first_tokens, errors = dict[str, list[float]](), dict[str, list[str]]()
        for endpoint in rounds[0].answers:
            some = [answer for one in rounds for answer in one.answers[endpoint]]
            first_tokens[endpoint] = [one.first_token_s for one in some if not one.error]
            errors[endpoint] = sorted({one.error for one in some if one.error})
        figures = [round_figures(one, **limits) for one in rounds]
        return cls(name=name, rounds=figures, first_tokens=first_tokens, errors=errors)

    def figures(self) -> dict[str, float]:
        """Return every figure, by its name in the JSON."""
        start = f"serving_{self.name.replace('-', '_')}"
        kinds = ("", 5, over_rounds(self.rounds)), ("_ratio", 4, ratios(self.rounds))
        return {
            f"{start}_{name}{suffix}_{endpoint}": round(value, digits)
            for suffix, digits, found in kinds
            for endpoint, figures in found.items()
            for name, value in figures.items()
        }


def serving_report(sections: Sequence[Section], facts: Mapping[str, Any]) -> Report:
    """Return the report: a table for each workload, and what went wrong."""
    parts: list[str | Table] = []
    found: dict[str, Any] = {}
    for section in sections:
        found |= section.figures()
        parts.append(_table(section))
        for endpoint, errors in section.errors.items():
            parts += [f"{endpoint}: {error}" for error in errors[:3]]
    found |= {"workloads": [asdict(one) for one in sections], **facts, **machine_facts()}
    # An endpoint of which nothing came was not measured.
    has_failed = not all(some for one in sections for some in one.first_tokens.values())
    draw = partial(_draw, sections)
    return Report(parts=parts, facts=found, figure=draw, has_failed=has_failed)


def _draw(sections: Sequence[Section]) -> Figure:
    """Draw the share of requests that had their first token by a time."""
    figure, panels = blank_figure(8, 3.5 * len(sections), rows=len(sections))
    for axes, section in zip(panels, sections, strict=True):
        for endpoint, seconds in section.first_tokens.items():
            shares = [100 * (at + 1) / len(seconds) for at in range(len(seconds))]
            axes.step(sorted(seconds), shares, where="post", label=endpoint)
        axes.set_title(section.name, loc="left")
        axes.set_xlabel("time to the first token, s")
        axes.set_ylabel("requests, %")
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
    return figure


def _table(section: Section) -> Table:
    found, better = over_rounds(section.rounds), ratios(section.rounds)
    first = next(iter(found))
    table = empty_table("", numbers=[*found], title=section.name)
    for figure, (title, written) in _ROWS.items():
        if any(figure in figures for figures in found.values()):
            values = (figures.get(figure) for figures in found.values())
            table.add_row(title, *("" if one is None else written.format(one) for one in values))
    table.add_section()
    for figure in next(iter(better.values()), {}):
        times = (better.get(name, {}).get(figure) for name in found)
        cells = ("" if one is None else f"{one:.2f}x" for one in times)
        table.add_row(f"{first} is better: {_ROWS[figure][0].strip()}", *cells)
    return table
