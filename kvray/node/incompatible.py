"""Explains why two replicas that get the same text share no blocks."""

from collections.abc import Mapping

_VALUE_MAX = 48
"""Characters shown of a value."""
_BEFORE = 8
"""Characters shown before the first difference."""


def explain(num_tokens: int, replica: str, difference: Mapping[str, tuple[object, object]]) -> str:
    """Return lines for people: the missed tokens, how the namespaces differ, the fix.

    `num_tokens` were missed in prompts whose first tokens `replica` has stored. `difference` is
    field of the namespace -> (value here, value there).
    """
    rows = [(name, *_shown(_text(mine), _text(its))) for name, (mine, its) in difference.items()]
    names, ours = (max((len(row[at]) for row in rows), default=0) for at in (0, 1))
    return "\n".join(
        [
            f"kvray: {num_tokens:,} tokens were missed in prompts that begin like some of replica"
            f" {replica!r}. It stored those in another namespace, which cannot be shared:",
            *(f"  {name:{names}}  here {mine:{ours}}  there {its}" for name, mine, its in rows),
            "Start both replicas with the same model and engine arguments to have them share; if"
            " the difference is meant, ignore this.",
        ]
    )


def _text(value: object) -> str:
    """Return a value, in quotes if its edges would be invisible without them."""
    text = str(value)
    return text if text.isprintable() and text.strip() == text != "" else repr(value)


def _shown(mine: str, theirs: str) -> tuple[str, str]:
    """Return both values; of long ones the part where they begin to differ."""
    if max(len(mine), len(theirs)) <= _VALUE_MAX:
        return mine, theirs
    pairs = enumerate(zip(mine, theirs, strict=False))
    apart = next((at for at, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    start = max(0, apart - _BEFORE)
    return _cut(mine, start), _cut(theirs, start)


def _cut(value: str, start: int) -> str:
    end = start + _VALUE_MAX
    return ("..." if start else "") + value[start:end] + ("..." if len(value) > end else "")
