"""What a run works with: an arena that this process owns, a writer and readers beside it."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvray.cli.bench.pairs import Timing, over_all
from kvray.cli.bench.scale import NUM_READERS, Scale
from kvray.cli.bench.worker import Worker, call_all
from kvray.cli.interrupts import Interrupts
from kvray.errors import ConfigError
from kvray.store import Arena, ArenaOwner, ArenaSpec

_LOCK_WAIT_S = 1.0


class Stage:
    """The arena and the processes of a run; all end with the stack that was given."""

    def __init__(
        self, scale: Scale, *, directory: Path, stack: ExitStack, interrupts: Interrupts
    ) -> None:
        """Start the processes; there is no arena yet.

        Raises:
            ConfigError: no directory can be made in `directory`.
        """
        self.scale = scale
        self._arena: Arena | None = None
        self.num_chains = 0
        with interrupts.held():
            self._directory = make_directory(directory)
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._drop_arena)
            workers = []
            for _ in range(1 + NUM_READERS):
                workers.append(Worker())
                stack.callback(workers[-1].close)
        self.writer, *self.readers = workers

    def make_arena(self, spec: ArenaSpec, *, readers: bool = True) -> None:
        """Make an arena in place of the one before, and attach the writer, and the readers."""
        users = [self.writer, *(self.readers if readers else ())]
        call_all([self.writer, *self.readers], "detach")
        self._drop_arena()
        self._arena = Arena.create(self._directory, spec, lock_wait_s=_LOCK_WAIT_S)
        call_all(users, "attach", directory=str(self._directory))

    def clear(self) -> None:
        """Evict every block."""
        assert self._arena is not None
        ArenaOwner(self._arena).clear()

    def next_chain(self) -> int:
        """Return the number of a chain that nothing has been stored under yet."""
        self.num_chains += 1
        return self.num_chains

    def time(self, workers: list[Worker], name: str, **arguments: Any) -> Timing:
        """Have `workers` do a timed piece of work at once; return the timing of all of it."""
        return over_all([tuple(span) for span in call_all(workers, name, **arguments)])

    def _drop_arena(self) -> None:
        if self._arena is not None:
            ArenaOwner(self._arena).retire()
            self._arena.close()
            self._arena = None


def make_directory(parent: Path) -> Path:
    """Make a directory of the bench's own in `parent`.

    Raises:
        ConfigError: none can be made there.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="kvray-bench-", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"The bench cannot make a directory in {parent} ({error.strerror}); set arena.dir to"
            " one that this user may write to."
        ) from None
