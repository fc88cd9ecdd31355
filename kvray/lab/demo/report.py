"""The output of the demo: a table and a verdict, or one JSON object."""

import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvray.lab.demo.engines import TOKENS_PER_BLOCK
from kvray.lab.demo.phases import PHASES
from kvray.lab.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record, Verdict, found_tokens

_WIDTH_WITHOUT_TEXT = 67
_TEXT_MIN = 10
_NAMES = ("phase", "replica", "prompt", "prompt_tokens", "reused_tokens", "hit_tokens")


def make_table(records: Sequence[Record], *, width: int) -> Table:
    """Return one row for each request; the text gets what the other columns leave of `width`."""
    room = max(_TEXT_MIN, width - _WIDTH_WITHOUT_TEXT)
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for name in ("phase", "replica", "prompt"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt\ntokens", "own\npool", "hit\ntokens", "first\ntoken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    phase = records[0].phase if records else ""
    for record in records:
        if record.phase != phase:
            table.add_section()
        phase = record.phase
        text = Text(" ".join(record.text.split()))
        text.truncate(room, overflow="ellipsis")
        table.add_row(
            record.phase,
            record.replica,
            record.prompt,
            str(record.prompt_tokens),
            str(record.reused_tokens),
            f"[bold green]{record.hit_tokens}[/]" if record.hit_tokens else "0",
            duration(record.ttft_s),
            text,
        )
    return table


def print_all(
    console: Console, records: Sequence[Record], verdict: Verdict, *, seconds: float
) -> None:
    """Print the table and the verdict."""
    console.print(make_table(records, width=console.width))
    if verdict.identical_text:
        console.print("[green]✔[/] Every text equals that of an engine that reuses nothing.")
    for failure in verdict.failures:
        console.print(f"[red]✘[/] {failure}")
    console.print(
        f"The first token of the long prompt came {verdict.ttft_ratio:.1f} times sooner from the"
        " blocks of the other replica."
    )
    result = "[bold red]failed[/]" if verdict.failures else "[bold green]passed[/]"
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
            {name: getattr(record, name) for name in _NAMES}
            | {"ttft_s": round(record.ttft_s, 6), "text": record.text}
            for record in records
        ],
    }
    return json.dumps(found, indent=2)


def duration(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
