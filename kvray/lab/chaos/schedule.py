"""The schedule of faults, and the settings of the tier: pure functions of a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    strikes_all: bool = False
    """Whether it strikes the nodes one by one, each for a time of its own."""


_SHORT, _LONG = (0.2, 3.0), (11.0, 14.0)
KINDS = (
    *(Kind(f"kill_{part}", f"kill -9 of one {part}") for part in PARTS),
    *(Kind(f"stop_{part}", f"SIGSTOP of one {part}", _SHORT, _LONG) for part in PARTS),
    Kind("cut_link", "a node's cable is pulled", (0.5, 6.0), needs_root=True),
    Kind(
        "cut_links",
        "all cables are pulled one by one",
        (1.0, 6.0),
        needs_root=True,
        nodes_min=2,
        strikes_all=True,
    ),
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
_NEXT_S = 0.3
"""Time between the strikes of a kind that strikes all nodes."""


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
    *,
    seed: int,
    duration_s: float,
    quiet_s: float,
    gap_s: float,
    kinds: Sequence[Kind],
    num_nodes: int,
) -> list[Fault]:
    """Return the faults of a run: each kind equally often, in an order that the seed decides.

    No fault strikes in the last `quiet_s`, nor in half that time at the start. Two strikes are
    `gap_s` apart on average. There is at least one kind.
    """
    random_ = random.Random(seed)
    found: list[tuple[float, float, str, float]] = []
    at, last = quiet_s / 2, duration_s - quiet_s
    deck: list[Kind] = []
    while at < last:
        if not deck:
            deck = list(kinds)
            random_.shuffle(deck)
        kind = deck.pop()
        is_long = random_.random() < _LONG_SHARE
        span = kind.long_s if is_long and kind.long_s else kind.lasts_s
        choices = [random_.random()]
        if kind.strikes_all:
            choices = [(node + 0.5) / num_nodes for node in range(num_nodes)]
            random_.shuffle(choices)
        for nth, choice in enumerate(choices):
            strikes_s = min(at + nth * _NEXT_S, last)
            ends_s = min(strikes_s + (random_.uniform(*span) if span else 0.0), last)
            found.append((strikes_s, ends_s, kind.name, choice))
        at += random_.uniform(0.5, 1.5) * gap_s
    return [
        Fault(number=number, kind=name, strikes_s=strikes_s, ends_s=ends_s, choice=choice)
        for number, (strikes_s, ends_s, name, choice) in enumerate(sorted(found))
    ]


def draw_settings(seed: int) -> dict[str, dict[str, Any]]:
    """Return settings of a small tier: no rule, size or transport is only ever tested alone.

    Blocks are checked whatever is drawn, as some faults change their bytes.
    """
    choose = random.Random(f"settings {seed}").choice
    return {
        "arena": {
            "capacity": choose(("24MiB", "32MiB", "48MiB")),
            "slab": choose(("1MiB", "2MiB", "4MiB")),
            "slot_min": choose(("16KiB", "64KiB")),
            "policy": choose(("gittins", "lru")),
            "free_target": choose((0.02, 0.05, 0.15)),
            "limbo_s": 10,
            # All nodes share the cores of this machine: wait for a neighbour to be scheduled.
            "lock_wait_s": 0.02,
        },
        # Larger than the arena, and on the disk that faults fill up.
        "nvme": {
            "capacity": "64MiB",
            "segment": choose(("1MiB", "2MiB", "4MiB")),
            "free_reserve": "1MiB",
            "admission": choose(("likely", "twice", "all")),
        },
        "lookup": {"partitions": choose((1, 2, 3))},
        "staging": {"transports": choose((["nixl", "object_ref"], ["object_ref"]))},
        "connector": {"model_key": "tiny", "verify_on_load": choose(("always", "auto"))},
    }
