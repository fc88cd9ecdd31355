"""Which fault strikes when: a pure function of a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("shard", "mover", "lookup", "supervisor", "engine", "raylet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to break something.

    `lasts_s` is the shortest and longest time until the fault is taken back, and `long_s` the same
    for the one in four that is to be longer than every deadline; None: it cannot be taken back.
    """

    name: str
    what: str
    lasts_s: tuple[float, float] | None = None
    long_s: tuple[float, float] | None = None
    needs_root: bool = False


_KILLS = tuple(Kind(name=f"kill_{part}", what=f"kill -9 of a {part}") for part in PARTS)
_STOPS = tuple(
    Kind(
        name=f"stop_{part}",
        what=f"SIGSTOP of a {part}, later SIGCONT",
        lasts_s=(0.2, 3.0),
        long_s=(11.0, 14.0),
    )
    for part in PARTS
)
KINDS = (
    *_KILLS,
    *_STOPS,
    Kind(name="cut_link", what="a node's cable is pulled", lasts_s=(0.5, 6.0), needs_root=True),
    Kind(name="slow_link", what="a node's cable is slow", lasts_s=(1.0, 6.0), needs_root=True),
    Kind(name="fill_tmpfs", what="the arena's mount is full", lasts_s=(1.0, 4.0), needs_root=True),
    Kind(name="fill_disk", what="the disk of Ray is full", lasts_s=(1.0, 4.0), needs_root=True),
    Kind(name="fill_arena", what="somebody fills an arena with junk", lasts_s=(1.0, 3.0)),
    Kind(name="truncate", what="kill -9 of a mover in the middle of a transfer"),
    Kind(name="flip_bytes", what="bytes of complete blocks are flipped"),
)
"""All of them, by the order of the report."""

_LONG_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Times are in seconds from the start of the load."""

    number: int
    kind: str
    strikes_s: float
    ends_s: float
    """Equal to `strikes_s` for what cannot be taken back."""
    choice: float
    """From 0 to 1: which of the parts that it can strike."""


def make_schedule(
    *, seed: int, duration_s: float, quiet_s: float, gap_s: float, kinds: Sequence[Kind]
) -> list[Fault]:
    """Return the faults of a run: each kind equally often, in an order that the seed decides.

    Args:
        seed: equal seeds give equal schedules.
        duration_s: length of the run.
        quiet_s: no fault strikes, or is still there, in that time before the run's end, and none
            strikes in half of it after its start.
        gap_s: mean time between two strikes.
        kinds: what may strike.

    Raises:
        ValueError: there is no kind.
    """
    if not kinds:
        raise ValueError("no kind of fault is left")
    random_ = random.Random(seed)
    faults: list[Fault] = []
    at, last = quiet_s / 2, duration_s - quiet_s
    deck: list[Kind] = []
    while at < last:
        if not deck:
            deck = list(kinds)
            random_.shuffle(deck)
        kind = deck.pop()
        lasts_s = _draw_length(kind, random_)
        faults.append(
            Fault(
                number=len(faults),
                kind=kind.name,
                strikes_s=at,
                ends_s=max(at, min(at + lasts_s, last)),
                choice=random_.random(),
            )
        )
        at += random_.uniform(0.5, 1.5) * gap_s
    return faults


def _draw_length(kind: Kind, random_: random.Random) -> float:
    is_long = random_.random() < _LONG_SHARE
    span = kind.long_s if is_long and kind.long_s else kind.lasts_s
    return random_.uniform(*span) if span else 0.0
