"""The output of the demo: a table and a verdict, one JSON object, or a picture."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvray.console.output import write_picture
from kvray.lab.demo.engines import PHASES
from kvray.lab.demo.prompts import TOKENS_PER_BLOCK
from kvray.lab.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record, Verdict, found_tokens
from kvray.reference import Output

_TOKENS = ("prompt_tokens", "reused_tokens", "hit_tokens")
_COMPUTED, _OWN, _HIT = "#b8bcc2", "#9cc6e6", "#2a78b5"
_LEGEND = {"computed": _COMPUTED, "from the engine's own pool": _OWN, "from the tier": _HIT}
_GAP = 1.1
"""Rows between two phases, for the title of the second."""
_INCHES_PER_ROW = 0.28


def make_table(records: Sequence[Record]) -> Table:
    """Return one row for each request; the text gets the width that the other columns leave."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for name in ("phase", "replica", "prompt"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt\ntokens", "own\npool", "hit\ntokens", "first\ntoken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text")
    for phase, of_phase in groupby(records, key=lambda record: record.phase):
        for record in of_phase:
            output = record.output
            table.add_row(
                *(phase, record.replica, record.prompt),
                *(str(output.prompt_tokens), str(output.reused_tokens)),
                Text(str(output.hit_tokens), style="bold green" if output.hit_tokens else ""),
                duration(output.ttft_s),
                Text(" ".join(record.text.split()), no_wrap=True, overflow="ellipsis"),
            )
        table.add_section()
    return table


def print_all(
    console: Console, records: Sequence[Record], verdict: Verdict, *, seconds: float
) -> None:
    """Print the table and the verdict."""
    console.print(make_table(records))
    if verdict.identical_text:
        console.print("✔ Every text equals that of an engine that reuses nothing.")
    for failure in verdict.failures:
        console.print(f"✘ {failure}", soft_wrap=True)
    console.print(
        f"The first token of the long prompt came {verdict.ttft_ratio:.1f} times sooner from the"
        " blocks of the other replica."
    )
    result = "failed" if verdict.failures else "passed"
    console.print(f"Verdict: {result}, {verdict.wrong_tokens} wrong tokens, {seconds:.0f} s.")


def to_json(records: Sequence[Record], verdict: Verdict, *, model: str, seconds: float) -> str:
    """Return everything as one JSON object."""
    found = {
        "identical_text": verdict.identical_text,
        "wrong_tokens": verdict.wrong_tokens,
        "ttft_ratio": round(verdict.ttft_ratio, 2),
        "passed": not verdict.failures,
        "failures": verdict.failures,
        "phase_c": {
            "without_kvray_reused_tokens": found_tokens(records, WITHOUT_KVRAY),
            "with_kvray_reused_tokens": found_tokens(records, WITH_KVRAY),
        },
        "phases": {phase.name: phase.title for phase in PHASES},
        "model": model,
        "tokens_per_block": TOKENS_PER_BLOCK,
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
    }
    return json.dumps(found, indent=2)


def duration(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a PNG with the time to the first token of every request, by where its prefix was.

    Raises:
        ConfigError: the file cannot be written.
    """
    order = [phase.name for phase in PHASES]
    places = [at + _GAP * order.index(record.phase) for at, record in enumerate(records)]
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 1 + _INCHES_PER_ROW * max(places)), layout="constrained")
    axes = figure.subplots()
    colours = [colour_of(record.output) for record in records]
    axes.barh(places, [record.output.ttft_s for record in records], 0.8, color=colours)
    names = [f"{one.replica}, {one.prompt}, {one.output.prompt_tokens:,} tokens" for one in records]
    axes.set_yticks(places, names)
    titles = {phase.name: phase.title for phase in PHASES}
    for place, record in zip(places, records, strict=True):
        ttft_s = record.output.ttft_s
        axes.annotate(f" {duration(ttft_s)}", (ttft_s, place), va="center", fontsize=8)
        if title := titles.pop(record.phase, None):  # at its first request
            axes.text(0, place - 0.85, f"{record.phase}: {title}", va="center", weight="bold")
    axes.set_ylim(max(places) + 0.6, -1.4)
    axes.set_xlabel("time to the first token, s")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=name) for name, colour in _LEGEND.items()]
    axes.legend(handles=patches, frameon=False, loc="lower right")
    write_picture(figure, path)


def colour_of(output: Output) -> str:
    """Return the colour of the bar of an answer."""
    if output.hit_tokens:
        return _HIT
    return _OWN if output.reused_tokens else _COMPUTED
