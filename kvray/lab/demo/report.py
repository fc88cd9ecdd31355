"""The output of the demo: a table and a verdict, or one JSON object."""

import json
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvray.lab.demo.phases import PHASES
from kvray.lab.demo.prompts import TOKENS_PER_BLOCK
from kvray.lab.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record, Verdict, found_tokens

_TOKENS = ("prompt_tokens", "reused_tokens", "hit_tokens")


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
