"""Which setting was meant by a name that is none."""

import difflib
from collections.abc import Iterator, Sequence

from kvray.config.schema import setting_rows
from kvray.config.sections import NodeConfig

_NEAR = 0.6
_NEAR_ELSEWHERE = 0.75
"""How alike names of another section must be, which is said less surely."""


def nearest(sections: Sequence[str], key: str) -> list[str]:
    """Return the settings that may be meant by `key` in `sections`, dotted; the best only.

    The settings beside it come first, then those of that name in other sections.
    """
    siblings = list(_names_in(sections))
    near = difflib.get_close_matches(key.lower(), siblings, n=1, cutoff=_NEAR)
    if near:
        return [".".join((*sections, near[0]))]
    elsewhere = {
        name: max(_alike(key, name.rpartition(".")[2]), _alike(key, name)) for name in _all_names()
    }
    best = max(elsewhere.values())
    if best < _NEAR_ELSEWHERE:
        return []
    return [name for name, ratio in elsewhere.items() if ratio == best]


def names_in(sections: Sequence[str]) -> list[str]:
    """Return the names of what can be set in a section, itself sections included."""
    return sorted(_names_in(sections))


def _names_in(sections: Sequence[str]) -> Iterator[str]:
    within = [part for part in sections if not part.isdigit()]
    if within == ["nodes"]:
        yield from NodeConfig.model_fields
        return
    if within[:1] == ["nodes"]:
        within = within[1:]  # its sections have the names of those at the top
    names = {
        name.split(".")[len(within)]: None
        for name in _all_names()
        if name.split(".")[: len(within)] == within and name.count(".") >= len(within)
    }
    yield from names


def _all_names() -> list[str]:
    return [row.name for row in setting_rows()]


def _alike(one: str, other: str) -> float:
    matcher = difflib.SequenceMatcher(None, _flat(one), _flat(other))
    return float(matcher.ratio())


def _flat(name: str) -> str:
    return name.lower().replace(".", "_").replace("-", "_")
