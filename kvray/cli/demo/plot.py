"""What the demo measured, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvray.cli.demo.phases import PHASES
from kvray.cli.demo.record import Record
from kvray.cli.demo.report import duration
from kvray.cli.picture import write_picture

_COMPUTED, _OWN, _HIT = "#b8bcc2", "#9cc6e6", "#2a78b5"
_LEGEND = {"computed": _COMPUTED, "from the engine's own pool": _OWN, "from the tier": _HIT}
_GAP = 1.1
"""Between two phases, for the title of the second, in rows."""
_INCHES_PER_ROW = 0.28


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a PNG with the time to the first token of every request, by where its prefix was.

    Raises:
        ConfigError: the file cannot be written.
    """
    places = _places(records)
    figure = Figure(figsize=(9, 1 + _INCHES_PER_ROW * max(places)), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        places,
        [record.ttft_s for record in records],
        0.8,
        color=[colour_of(record) for record in records],
    )
    axes.set_yticks(places, [_label(record) for record in records])
    for place, record in zip(places, records, strict=True):
        axes.annotate(
            f" {duration(record.ttft_s)}", (record.ttft_s, place), va="center", fontsize=8
        )
    titles = {phase.name: phase.title for phase in PHASES}
    for phase in sorted({record.phase for record in records}):
        first = next(
            at for at, record in zip(places, records, strict=True) if record.phase == phase
        )
        axes.text(0, first - 0.85, f"{phase}: {titles[phase]}", va="center", weight="bold")
    axes.set_ylim(max(places) + 0.6, -1.4)
    axes.set_xlabel("time to the first token, s")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=name) for name, colour in _LEGEND.items()]
    axes.legend(handles=patches, frameon=False, loc="lower right")
    write_picture(figure, path)


def colour_of(record: Record) -> str:
    """Return the colour of the bar of a request."""
    if record.hit_tokens:
        return _HIT
    return _OWN if record.reused_tokens else _COMPUTED


def _places(records: Sequence[Record]) -> list[float]:
    """Return where each bar is from above: apart by one, and by more between phases."""
    places: list[float] = []
    before = None
    for record in records:
        step = 1 if record.phase == before else 1 + _GAP
        places.append(places[-1] + step if places else 0.0)
        before = record.phase
    return places


def _label(record: Record) -> str:
    return f"{record.replica}, {record.prompt}, {record.prompt_tokens:,} tokens"
