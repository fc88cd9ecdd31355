"""The demo's records of its requests, the verdict on them, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from kvray.console.output import blank_figure, empty_table
from kvray.lab.report import Report
from kvray.reference import Output
from kvray.reference.output import count_wrong

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORACLE = "oracle"
"""The phase, and its only replica, without a connector and without any reuse."""
WITH_KVRAY, WITHOUT_KVRAY = "with kvray", "without kvray"
"""The two replicas of phase c."""

_TOKENS = ("prompt_tokens", "reused_tokens", "hit_tokens")
_COLOURS = {
    "computed": "#b8bcc2",
    "from the engine's own pool": "#9cc6e6",
    "from the tier": "#2a78b5",
}
_GAP = 1.1
"""Rows between two phases, for the title of the second."""
_INCHES_PER_ROW = 0.28


@dataclass(frozen=True, slots=True)
class Record:
    """One answered request."""

    phase: str
    replica: str
    prompt: str
    output: Output
    expected_hit_tokens: int | None = None
    """Tokens that the tier must give, neither less nor more; None: any number."""

    @property
    def text(self) -> str:
        """The answer as it can be printed: a tiny model answers with any bytes."""
        return self.output.text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the demo showed its claims; `failures` has a sentence for each that it did not."""

    identical_text: bool
    wrong_tokens: int
    ttft_ratio: float
    """Cold over shared time to the first token, of the first prompt of phase a."""
    failures: tuple[str, ...]


def judge(records: Sequence[Record], *, oracle: dict[str, Record]) -> Verdict:
    """Compare all answers with the oracle's of the same prompts, and hits with the expected."""
    truths = [oracle[record.prompt] for record in records]
    wrong = [
        count_wrong(record.output.token_ids, truth.output.token_ids)
        for record, truth in zip(records, truths, strict=True)
    ]
    failures = [
        f"Phase {record.phase}: {record.replica} answered {record.prompt!r} with {count} other"
        " tokens than an engine without any reuse."
        for record, count in zip(records, wrong, strict=True)
        if count
    ]
    failures += [
        f"Phase {record.phase}: {record.replica} found {record.output.hit_tokens} tokens of"
        f" {record.prompt!r} in the tier, and should have found {record.expected_hit_tokens}."
        for record in records
        if record.expected_hit_tokens not in (None, record.output.hit_tokens)
    ]
    without, with_kvray = (found_tokens(records, one) for one in (WITHOUT_KVRAY, WITH_KVRAY))
    if without != 0 or with_kvray == 0:
        failures.append(
            f"Phase c: {without} tokens were reused without kvray, and should have been none;"
            f" {with_kvray} were reused with it, and should have been most."
        )
    cold, shared = [record.output.ttft_s for record in records if record.phase == "a"][:2]
    same_text = [one.text == truth.text for one, truth in zip(records, truths, strict=True)]
    return Verdict(
        identical_text=all(same_text) and not any(wrong),
        wrong_tokens=sum(wrong),
        ttft_ratio=cold / max(shared, 1e-9),
        failures=tuple(failures),
    )


def found_tokens(records: Sequence[Record], replica: str) -> int:
    """Return how many tokens a replica found, in its own pool or in the tier."""
    mine = [record.output for record in records if record.replica == replica]
    return sum(output.reused_tokens + output.hit_tokens for output in mine)


def report(
    records: Sequence[Record],
    verdict: Verdict,
    *,
    titles: Mapping[str, str],
    facts: Mapping[str, object],
    seconds: float,
) -> Report:
    """Return the report of a demo, with its phases' `titles` and more `facts` for the JSON."""
    # The text gets the width that the other columns leave.
    numbers = ("prompt\ntokens", "own\npool", "hit\ntokens", "first\ntoken")
    table = empty_table("phase", "replica", "prompt", numbers=numbers, rest=["text"])
    for _, of_phase in groupby(records, key=lambda record: record.phase):
        for record in of_phase:
            output = record.output
            table.add_row(
                *(record.phase, record.replica, record.prompt),
                *(str(output.prompt_tokens), str(output.reused_tokens)),
                Text(str(output.hit_tokens), style="bold green" if output.hit_tokens else ""),
                _time(output.ttft_s),
                Text(" ".join(record.text.split()), no_wrap=True, overflow="ellipsis"),
            )
        table.add_section()
    same = "✔ Every text equals that of an engine that reuses nothing."
    result = "failed" if verdict.failures else "passed"
    return Report(
        parts=[
            table,
            *([same] if verdict.identical_text else []),
            *(f"✘ {failure}" for failure in verdict.failures),
            f"The first token of the long prompt came {verdict.ttft_ratio:.1f} times sooner from"
            " the blocks of the other replica.",
            f"Verdict: {result}, {verdict.wrong_tokens} wrong tokens, {seconds:.0f} s.",
        ],
        facts={
            "identical_text": verdict.identical_text,
            "wrong_tokens": verdict.wrong_tokens,
            "ttft_ratio": round(verdict.ttft_ratio, 2),
            "passed": not verdict.failures,
            "failures": verdict.failures,
            "phase_c": {
                "without_kvray_reused_tokens": found_tokens(records, WITHOUT_KVRAY),
                "with_kvray_reused_tokens": found_tokens(records, WITH_KVRAY),
            },
            "phases": titles,
            **facts,
            "seconds": round(seconds, 1),
            "requests": [
                {
                    "phase": record.phase,
                    "replica": record.replica,
                    "prompt": record.prompt,
                    **{name: getattr(record.output, name) for name in _TOKENS},
                    "ttft_s": round(record.output.ttft_s, 6),
                    "text": record.text,
                }
                for record in records
            ],
        },
        figure=lambda: _draw(records, titles),
        has_failed=bool(verdict.failures),
    )


def _draw(records: Sequence[Record], titles: Mapping[str, str]) -> Figure:
    """Draw the time to the first token of every request, by where its prefix was."""
    from matplotlib.patches import Patch

    places = [at + _GAP * [*titles].index(record.phase) for at, record in enumerate(records)]
    figure, (axes,) = blank_figure(9, 1 + _INCHES_PER_ROW * max(places))
    colours = [_COLOURS[source_of(record.output)] for record in records]
    axes.barh(places, [record.output.ttft_s for record in records], 0.8, color=colours)
    names = [f"{one.replica}, {one.prompt}, {one.output.prompt_tokens:,} tokens" for one in records]
    axes.set_yticks(places, names)
    untitled = dict(titles)
    for place, record in zip(places, records, strict=True):
        ttft_s = record.output.ttft_s
        axes.annotate(f" {_time(ttft_s)}", (ttft_s, place), va="center", fontsize=8)
        if title := untitled.pop(record.phase, None):  # at its first request
            axes.text(0, place - 0.85, f"{record.phase}: {title}", va="center", weight="bold")
    axes.set_ylim(max(places) + 0.6, -1.4)
    axes.set_xlabel("time to the first token, s")
    patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    axes.legend(handles=patches, frameon=False, loc="lower right")
    return figure


def source_of(output: Output) -> str:
    """Return where the prefix of an answer was; a hit counts whatever the pool had beside it."""
    if output.hit_tokens:
        return "from the tier"
    return "from the engine's own pool" if output.reused_tokens else "computed"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
