"""What the demo shows: bars while it works, then a table and a verdict, or one JSON object."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvray.cli.demo.phases import PHASES, Phase
from kvray.cli.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record, Verdict
from kvray.cli.demo.stage import TOKENS_PER_BLOCK

_WIDTH_WITHOUT_TEXT = 67
_TEXT_MIN = 10


class Bars:
    """A bar for each phase on a terminal; elsewhere a line when a phase has ended."""

    def __init__(self, console: Console, phases: Sequence[Phase]) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            phase.name: self._progress.add_task(_title(phase), total=phase.num_steps, start=False)
            for phase in phases
        }

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[Callable[[], None]]:
        """Show a phase that goes on; gives what is to be called after each of its steps."""
        began = time.monotonic()
        task = self._tasks[phase.name]
        self._progress.start_task(task)
        yield partial(self._progress.advance, task)
        if not self._console.is_terminal:
            self._console.print(f"{_title(phase)}: done in {time.monotonic() - began:.0f} s")


def make_table(records: Sequence[Record], *, width: int) -> Table:
    """Return one row for each request; the text gets what the other columns leave of `width`."""
    room = max(_TEXT_MIN, width - _WIDTH_WITHOUT_TEXT)
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for name in ("phase", "replica", "prompt"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt\ntokens", "own\npool", "hit\ntokens", "first\ntoken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    phase = ""
    for record in records:
        if phase not in ("", record.phase):
            table.add_section()
        phase = record.phase
        table.add_row(
            record.phase,
            record.replica,
            record.prompt,
            str(record.prompt_tokens),
            str(record.reused_tokens),
            f"[bold green]{record.hit_tokens}[/]" if record.hit_tokens else "0",
            duration(record.ttft_s),
            Text(_shorten(_encodable(record.text), room)),
        )
    return table


def print_all(
    console: Console, records: Sequence[Record], verdict: Verdict, *, seconds: float
) -> None:
    """Print the table, and what it proves."""
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
    found: dict[str, Any] = {
        "identical_text": verdict.identical_text,
        "wrong_tokens": verdict.wrong_tokens,
        "ttft_ratio": round(verdict.ttft_ratio, 2),
        "passed": not verdict.failures,
        "failures": verdict.failures,
        "phase_c": {
            "without_kvray_reused_tokens": _found_tokens(records, WITHOUT_KVRAY),
            "with_kvray_reused_tokens": _found_tokens(records, WITH_KVRAY),
        },
        "phases": {phase.name: phase.title for phase in PHASES},
        "model": model,
        "tokens_per_block": TOKENS_PER_BLOCK,
        "seconds": round(seconds, 1),
        "requests": [_request(record) for record in records],
    }
    return json.dumps(found, indent=2)


def _request(record: Record) -> dict[str, Any]:
    return {
        "phase": record.phase,
        "replica": record.replica,
        "prompt": record.prompt,
        "prompt_tokens": record.prompt_tokens,
        "reused_tokens": record.reused_tokens,
        "hit_tokens": record.hit_tokens,
        "ttft_s": round(record.ttft_s, 6),
        "text": _encodable(record.text),
    }


def _found_tokens(records: Sequence[Record], replica: str) -> int:
    return sum(
        record.reused_tokens + record.hit_tokens for record in records if record.replica == replica
    )


def _title(phase: Phase) -> str:
    return f"Phase {phase.name}: {phase.title}" if len(phase.name) == 1 else phase.title


def duration(seconds: float) -> str:
    """Return a time as people read it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _shorten(text: str, room: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= room else text[: room - 1] + "…"


def _encodable(text: str) -> str:
    """Return `text` with what is no Unicode replaced: a tiny model answers with any bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")
