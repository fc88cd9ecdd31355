"""What `kvray explain` prints on the way that a request took to its replica; pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from kvray.console.tables import empty_table

_REASONS = {
    "prefix": "there its prompt was least work",
    "queue": "elsewhere its prompt was less work, but that replica was busier",
    "fallback": "its prompt was the same work everywhere, and this replica was the least busy",
}
_UNKNOWN = (
    "nobody said in time where its blocks are, or its token ids were not seen, and of two replicas"
    " this one had the shorter queue"
)
_TOKENS = ("pool", "host", "disk", "remote", "computed")
_SECONDS = ("queue", "bring", "compute", "first_token", "later", "crowd")


def routing_report(routing: Mapping[str, Any] | None) -> Iterator[RenderableType]:
    """Yield what a router compared, and in a sentence what it chose and how it turned out."""
    if routing is None:
        return
    if routing["candidates"]:
        yield _table(routing)
    why = _REASONS[routing["reason"]] if routing["candidates"] else _UNKNOWN
    yield (
        f"The router sent it to {routing['replica']} ({routing['reason']}): {why}."
        f" {_outcome(routing)}"
    )


def _table(routing: Mapping[str, Any]) -> Table:
    table = empty_table("replica", numbers=[*_TOKENS, *(_heading(name) for name in _SECONDS)])
    for one in routing["candidates"]:
        tokens = (f"{one[f'{name}_tokens']:,}" for name in _TOKENS)
        seconds = (_milliseconds(one[f"{name}_s"]) for name in _SECONDS)
        table.add_row(one["replica"], *tokens, *seconds)
    hidden = routing["num_candidates"] - len(routing["candidates"])
    if hidden > 0:
        table.add_row(f"and {hidden} more")
    return table


def _heading(part: str) -> str:
    return f"{part.replace('_', ' ')} ms"


def _outcome(routing: Mapping[str, Any]) -> str:
    predicted, real = routing["predicted_s"], routing["first_token_s"]
    said = "" if predicted is None else f"Predicted first token: {_milliseconds(predicted)} ms. "
    if real is not None:
        return f"{said}Its first token came after {_milliseconds(real)} ms."
    if routing["outcome"] == "not_answered":
        return f"{said}No first token came: see the log of Serve's ingress."
    return f"{said}Of its first token nothing has been told."


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
