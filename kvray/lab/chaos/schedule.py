"""The schedule of faults: a pure function of a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("shard", "mover", "lookup", "supervisor", "engine", "raylet")


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to break something.

    `lasts_s` is the shortest and longest time until the fault is undone. `long_s` is the same for
    one in four, which outlasts every deadline. None: it cannot be undone.
    """

    name: str
    text: str
    lasts_s: tuple[float, float] | None = None
    long_s: tuple[float, float] | None = None
    needs_root: bool = False
    nodes_min: int = 1


_SHORT, _LONG = (0.2, 3.0), (11.0, 14.0)
KINDS = (
    *(Kind(f"kill_{part}", f"kill -9 of one {part}") for part in PARTS),
    *(Kind(f"stop_{part}", f"SIGSTOP of one {part}", _SHORT, _LONG) for part in PARTS),
    Kind("cut_link", "a node's cable is pulled", (0.5, 6.0), needs_root=True),
    Kind("slow_link", "a node's cable is slow", (1.0, 6.0), needs_root=True),
    Kind("fill_tmpfs", "the arena's mount is full", (1.0, 4.0), needs_root=True),
    Kind("fill_disk", "Ray's disk is full", (1.0, 4.0), needs_root=True),
    Kind("fill_arena", "an arena is filled with junk", (1.0, 3.0)),
    Kind("truncate", "kill -9 of one mover during a transfer"),
    Kind("flip_bytes", "bytes of complete blocks are flipped"),
    Kind("drain", "a node is drained, and goes", (2.0, 8.0), nodes_min=2),
    Kind("call_off", "a drain is called off", (0.5, 4.0), nodes_min=2),
    Kind("preempt", "a node is lost in mid-drain", (0.2, 3.0), nodes_min=2),
    Kind("join", "a node joins, and goes", (10.0, 30.0)),
)
"""All of them, in the order of the report."""

_LONG_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Times are in seconds from the start of the load."""

    number: int
    kind: str
    strikes_s: float
    ends_s: float
    """Equal to `strikes_s` for faults that cannot be undone."""
    choice: float
    """From 0 to 1: chooses among the parts that it can strike."""


def make_schedule(
    *, seed: int, duration_s: float, quiet_s: float, gap_s: float, kinds: Sequence[Kind]
) -> list[Fault]:
    """Return the faults of a run: each kind equally often, in an order that the seed decides.

    No fault strikes in the last `quiet_s`, nor in half that time at the start. Two strikes are
    `gap_s` apart on average. ValueError: there is no kind.
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
        is_long = random_.random() < _LONG_SHARE
        span = kind.long_s if is_long and kind.long_s else kind.lasts_s
        ends_s = max(at, min(at + (random_.uniform(*span) if span else 0.0), last))
        fault = Fault(
            number=len(faults), kind=kind.name, strikes_s=at, ends_s=ends_s, choice=random_.random()
        )
        faults.append(fault)
        at += random_.uniform(0.5, 1.5) * gap_s
    return faults
