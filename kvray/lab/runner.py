"""A run of the lab: pairs of kvray's work and the bare work, progress, and an orderly end."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from rich.progress import Progress, TaskID

from kvray.config import KVRayConfig, format_size
from kvray.console.interrupts import Interrupts, masked
from kvray.console.progress import counting_progress
from kvray.errors import CapacityError, ConfigError, KVRayError
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner, ArenaSpec, Reservation
from kvray.store.machine.access import reason

if TYPE_CHECKING:
    from kvray.actors.tier.launch import Launch

LARGE_BYTES, SMALL_BYTES = 4 * 2**20, 128 * 2**10
TOKENS_PER_BLOCK = 32
SHORT_TOKENS, LONG_TOKENS = 8_192, 131_072
LOCK_WAIT_S = 1.0
"""No step may end as a miss: processes of one run take the arena's lock in turn."""
SLOT_MIN = 64 * 2**10
SLAB_BYTES = 64 * 2**20


class Duration(NamedTuple):
    """The time of some work, perhaps that of several processes at once."""

    seconds: float
    cpu_s: float = 0.0


class Pair(NamedTuple):
    """The same work done by kvray and bare, one right after the other."""

    ours: Duration
    floor: Duration


Timed = Callable[[int], Duration]
"""Timed work, which is told its pair."""


def timed(work: Callable[[], object]) -> Duration:
    """Do `work` and time it; the CPU time is that of all threads of this process."""
    cpu_s, began = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return Duration(seconds, time.process_time() - cpu_s)


def cpu_seconds(*pids: int) -> float:
    """Return the CPU time that processes have had so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


def measure(count: int, *, ours: Timed, floor: Timed, first: int = 0) -> list[Pair]:
    """Return `count` pairs; both sides are told which pair it is, counted from `first`.

    The sides take turns at going first, so that neither always finds the warmer caches.
    """
    pairs = []
    for index in range(first, first + count):
        bare = None if index % 2 else floor(index)
        mine = ours(index)
        pairs.append(Pair(mine, floor(index) if bare is None else bare))
    return pairs


def speed_ratio(pairs: Sequence[Pair]) -> float:
    """Return the median of kvray's speed over the floor's, pair by pair: at best about 1."""
    return statistics.median(pair.floor.seconds / pair.ours.seconds for pair in pairs)


def time_ratio(pairs: Sequence[Pair]) -> float:
    """Return the median of kvray's time over the floor's, pair by pair: at least about 1."""
    return statistics.median(pair.ours.seconds / pair.floor.seconds for pair in pairs)


def median_s(durations: Sequence[Duration]) -> float:
    """Return the median of the durations."""
    return statistics.median(one.seconds for one in durations)


def percentile_s(durations: Sequence[Duration], percent: float) -> float:
    """Return the `percentile` of the durations."""
    return percentile([one.seconds for one in durations], percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def over_all(spans: Sequence[tuple[float, float, float]]) -> Duration:
    """Return the duration of all spans: begin and end of each, by one clock, and CPU seconds."""
    began, ended, cpu_s = zip(*spans, strict=True)
    return Duration(max(ended) - min(began), sum(cpu_s))


def is_soon(until: Callable[[], object], timeout_s: float, *, poll_s: float = 0.01) -> bool:
    """Wait until `until` returns something true; return whether it did so in time."""
    deadline = time.monotonic() + timeout_s
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def require_room(needed: int, free: int, place: str, hint: str) -> None:
    """Raise CapacityError unless so many bytes are free in a place; `hint` says what to do."""
    if needed > free:
        raise CapacityError(
            f"The bench takes {format_size(needed)} of {place} and {format_size(free)} are free;"
            f" {hint}."
        )


def bench_spec(capacity: int, *, slot_min: int = SLOT_MIN) -> ArenaSpec:
    """Return an arena of the bench with room for `capacity` bytes of blocks."""
    return ArenaSpec(
        cluster_name="bench", capacity=capacity, slab=SLAB_BYTES, slot_min=slot_min, holders_max=16
    )


def reserve_all(arena: Arena, keys: Sequence[BlockKey], *, block_bytes: int) -> Reservation:
    """Reserve a slot for each key; KVRayError: the arena gave fewer."""
    made = arena.reserve(
        keys, parent=None, depth=0, part=0, block_bytes=block_bytes, wait_s=LOCK_WAIT_S
    )
    if made is None or len(made.slots) < len(keys):
        raise KVRayError("The bench's arena was busy or had no room; run it again.")
    return made


@dataclass(frozen=True, slots=True)
class Runner:
    """One run: its progress bar, and the stack that ends whatever the run has begun."""

    interrupts: Interrupts
    stack: ExitStack
    _progress: Progress
    _bar: TaskID

    def show(self, description: str, *, total: int | None = None) -> None:
        """Show the step that runs now; `total` is the number of steps of the whole run."""
        self._progress.update(self._bar, description=description, total=total, visible=True)

    def say(self, sentence: str) -> None:
        """Print a sentence beside the progress."""
        self._progress.console.print(sentence)

    def advance(self) -> None:
        """Count a step as done."""
        self._progress.advance(self._bar)

    @contextmanager
    def during(self, title: str, total: float | None = None) -> Iterator[Callable[..., None]]:
        """Show one part of a run; the callback takes how many steps of `total` are done, or 1.

        Without a terminal it prints a line when the part is over.
        """
        began, progress = time.monotonic(), self._progress
        progress.reset(self._bar, total=total, description=title, visible=True)
        yield lambda steps=1.0: progress.advance(self._bar, steps)
        if not progress.console.is_terminal:
            progress.console.print(f"{title}: done in {time.monotonic() - began:.0f} s")

    def start_tier(self, settings: KVRayConfig) -> Launch:
        """Start Ray and the tier, which end with the run."""
        with masked():
            from kvray.actors.tier.launch import local_tier
            from kvray.actors.tier.rollout import Observer

        check = self.interrupts.check  # a signal is held back until Ray can be ended
        observer = Observer(waiting=lambda elapsed_s: check(), report=lambda shards: check())
        with self.interrupts.held():
            return self.stack.enter_context(local_tier(settings, observer=observer))

    @contextmanager
    def scope(self) -> Iterator[Runner]:
        """Give a runner whose stack ends with the block, and not with the run."""
        with self.interrupts.closing() as stack:
            yield replace(self, stack=stack)

    def make_directory(self, parent: Path, named_by: str = "") -> Path:
        """Make a directory in `parent` until the end; ConfigError: this user cannot.

        `named_by` is the option or variable that `parent` is from; empty: it is arena.dir.
        """
        with self.interrupts.held():
            try:
                path = Path(tempfile.mkdtemp(prefix="kvray-bench-", dir=parent))
            except OSError as error:
                why = f"({error.strerror}); name one that this user may write to in {named_by}."
                says = why if named_by else reason(error)
                raise ConfigError(f"No directory can be made in {parent} {says}") from None
            self.stack.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def make_arena(self, directory: Path, spec: ArenaSpec) -> Arena:
        """Make an arena until the end; CapacityError: the memory has no room for it."""
        with self.interrupts.held():
            arena = Arena.create(directory, spec, lock_wait_s=LOCK_WAIT_S)
            self.stack.callback(arena.close)
            self.stack.callback(ArenaOwner(arena).retire)
        return arena


@contextmanager
def running(interrupts: Interrupts) -> Iterator[Runner]:
    """Give a runner that shows its progress on stderr; end all that it began, however it ends."""
    progress = counting_progress()
    bar = progress.add_task("", total=None, visible=False)
    with interrupts.closing() as stack:
        with masked():  # its thread takes no signal that is held back
            progress.start()
        try:
            yield Runner(interrupts, stack, progress, bar)
        finally:
            progress.stop()
