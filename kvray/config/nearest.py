"""Which setting was meant by an unknown name."""

import difflib
from collections.abc import Sequence

from kvray.config.schema import setting_rows
from kvray.config.sections import NodeConfig

_NEAR_ELSEWHERE = 0.75
"""How alike the name of a setting in another section must be, which is a bolder guess."""


def nearest(sections: Sequence[str], key: str) -> list[str]:
    """Return the settings that may be meant by `key` in `sections`, dotted; the best only.

    The settings beside it come first, then those of that name in other sections.
    """
    if near := difflib.get_close_matches(key.lower(), names_in(sections), n=1):
        return [".".join((*sections, near[0]))]
    elsewhere = {
        row.name: max(_alike(key, row.name.rpartition(".")[2]), _alike(key, row.name))
        for row in setting_rows()
    }
    best = max(_NEAR_ELSEWHERE, *elsewhere.values())
    return [name for name, ratio in elsewhere.items() if ratio == best]


def names_in(sections: Sequence[str]) -> list[str]:
    """Return the names of what can be set in a section, its sections included."""
    within = [part for part in sections if not part.isdigit()]
    if within == ["nodes"]:
        return sorted(NodeConfig.model_fields)
    if within[:1] == ["nodes"]:
        within = within[1:]  # its sections have the names of those at the top
    at = "".join(f"{part}." for part in within)
    names = (row.name.removeprefix(at) for row in setting_rows() if row.name.startswith(at))
    return sorted({name.partition(".")[0] for name in names})


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _flat(one), _flat(other)).ratio()


def _flat(name: str) -> str:
    return name.lower().replace(".", "_").replace("-", "_")
