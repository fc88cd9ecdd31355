"""Explains why two replicas that get the same text share no blocks."""

from collections.abc import Mapping
from itertools import takewhile

_VALUE_MAX = 48
"""Characters shown of a value."""
_BEFORE = 8
"""Characters shown before the first difference."""


def explain(num_tokens: int, replica: str, difference: Mapping[str, tuple[object, object]]) -> str:
    """Return lines for people: the missed tokens, how the namespaces differ, the fix.

    `num_tokens` were missed in prompts whose first tokens `replica` has stored. `difference` is
    field of the namespace -> (value here, value there).
    """
    rows = []
    for name, (mine, its) in difference.items():
        values = _text(mine), _text(its)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*values, strict=False))
        start = max(0, len(list(same)) - _BEFORE) if max(map(len, values)) > _VALUE_MAX else 0
        here, there = (_cut(value, start) for value in values)
        rows.append(f"  {name}: here {here}, there {there}")
    return "\n".join(
        [
            f"kvray: {num_tokens:,} tokens were missed in prompts that begin like some of replica"
            f" {replica!r}. It stored those in another namespace, which cannot be shared:",
            *rows,
            "Start both replicas with the same model and engine arguments to have them share; if"
            " the difference is meant, ignore this.",
        ]
    )


def _text(value: object) -> str:
    """Return a value, in quotes if its edges would be invisible without them."""
    text = str(value)
    return text if text.isprintable() and text.strip() == text != "" else repr(value)


def _cut(value: str, start: int) -> str:
    end = start + _VALUE_MAX
    return ("..." if start else "") + value[start:end] + ("..." if len(value) > end else "")
