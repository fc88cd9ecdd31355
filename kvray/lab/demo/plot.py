"""The times that the demo measured, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvray.console.output import write_picture
from kvray.lab.demo.phases import PHASES
from kvray.lab.demo.record import Record
from kvray.lab.demo.report import duration
from kvray.lab.reference import Output

_COMPUTED, _OWN, _HIT = "#b8bcc2", "#9cc6e6", "#2a78b5"
_LEGEND = {"computed": _COMPUTED, "from the engine's own pool": _OWN, "from the tier": _HIT}
_GAP = 1.1
"""Rows between two phases, for the title of the second."""
_INCHES_PER_ROW = 0.28


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a PNG with the time to the first token of every request, by where its prefix was.

    Raises:
        ConfigError: the file cannot be written.
    """
    order = [phase.name for phase in PHASES]
    places = [at + _GAP * order.index(record.phase) for at, record in enumerate(records)]
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
