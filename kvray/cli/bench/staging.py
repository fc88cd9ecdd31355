"""`kvray bench staging`: blocks brought from one node to another, beside the bare transports."""

from __future__ import annotations

import json
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console

from kvray import __version__
from kvray.cli.bench.pairs import Pair, Timing, median_s, speed_ratio
from kvray.cli.bench.report import make_table
from kvray.cli.bench.results import GB, Result, Target
from kvray.cli.bench.staging_play import BLOCK_BYTES
from kvray.cli.chaos.nodes import Machine
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import counting_progress
from kvray.errors import KVRayError

NUM_BLOCKS = 256
_LEAST_RATIO = 0.9
_TIMEOUT_S = 900.0
_PLAY = "kvray.cli.bench.staging_play"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFound:
    """What a run found, pair by pair."""

    num_blocks: int
    nixl: Sequence[Pair]
    """Staging by nixl, and one push by NIXL's own API as it is."""
    transport: Sequence[Pair]
    """The same staging, and one push by kvray's transport."""
    socket: Sequence[Pair]
    """The same staging, and a bare socket."""
    object_ref: Sequence[Pair]
    """Staging by object_ref, and bare objects of Ray that are copied into the arena."""

    def rows(self) -> list[Result]:
        """Return the rows of the table."""
        return [
            self._row("staging over nixl, bare NIXL push", "nixl", self.nixl, floor="raw_nixl"),
            self._row(
                "    one push of kvray's transport",
                "nixl",
                self.transport,
                floor="transport",
                ratio="nixl_transport",
            ),
            self._row(
                "    bare socket",
                "nixl",
                self.socket,
                floor="raw_socket",
                ratio="nixl_socket",
                is_judged=False,
            ),
            self._cpu_row(
                "    CPU time, both sides",
                ("staging_cpu_s_per_gb", "raw_nixl_cpu_s_per_gb"),
                self.nixl,
            ),
            self._row(
                "staging over object_ref, bare Ray objects",
                "object_ref",
                self.object_ref,
                floor="raw_ray",
            ),
            self._cpu_row(
                "    CPU time, both sides",
                ("staging_object_ref_cpu_s_per_gb", "raw_ray_cpu_s_per_gb"),
                self.object_ref,
            ),
        ]

    def to_json(self) -> str:
        """Return all figures as one JSON object."""
        rows = self.rows()
        found: dict[str, object] = {}
        for row in rows:
            found |= {name: float(f"{value:.5g}") for name, value in row.figures.items()}
        found |= {
            "missed": [row.title.strip() for row in rows if row.is_met is False],
            "blocks": self.num_blocks,
            "block_bytes": BLOCK_BYTES,
            "pairs": len(self.nixl),
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        }
        return json.dumps(found, indent=2)

    def print_all(self, console: Console) -> None:
        """Print the table, and what it is a table of."""
        console.print(make_table(self.rows()))
        console.print(
            f"{self.num_blocks} blocks of 4 MiB between two nodes of this machine, over its"
            f" loopback device, {len(self.nixl)} pairs on {psutil.cpu_count()} cores."
        )

    def _row(
        self,
        title: str,
        name: str,
        pairs: Sequence[Pair],
        *,
        floor: str,
        ratio: str | None = None,
        is_judged: bool = True,
    ) -> Result:
        num_bytes = self.num_blocks * BLOCK_BYTES
        ours = num_bytes / GB / median_s([pair.ours for pair in pairs])
        bare = num_bytes / GB / median_s([pair.floor for pair in pairs])
        quotient = speed_ratio(pairs)
        return Result(
            title=title,
            unit="GB/s",
            ours=ours,
            floor=bare,
            ratio=quotient,
            target=Target(limit=_LEAST_RATIO, is_least=True) if is_judged else None,
            judged=quotient,
            figures={
                f"staging_{ratio or name}_ratio": quotient,
                f"staging_{name}_gb_per_s": ours,
                f"{floor}_gb_per_s": bare,
            },
        )

    def _cpu_row(self, title: str, names: tuple[str, str], pairs: Sequence[Pair]) -> Result:
        num_gb = self.num_blocks * BLOCK_BYTES / GB
        ours = statistics.median(pair.ours.cpu_s for pair in pairs) / num_gb
        bare = statistics.median(pair.floor.cpu_s for pair in pairs) / num_gb
        return Result(
            title=title,
            unit="s/GB",
            ours=ours,
            floor=bare,
            ratio=None,
            target=None,
            judged=None,
            figures=dict(zip(names, (ours, bare), strict=True)),
        )


def measure_staging(
    *, num_blocks: int, repeat: int, console: Console, interrupts: Interrupts
) -> StagingFound:
    """Start two nodes, and bring blocks from one to the other.

    Args:
        num_blocks: of 4 MiB; both nodes have memory for as many.
        repeat: pairs of each measurement.
        console: where progress is shown.
        interrupts: what ends it early.

    Raises:
        KVRayError: Ray did not start, a transport is missing, or blocks did not come.
    """
    progress = counting_progress(console)
    with interrupts.closing() as stack, progress:
        bar = progress.add_task("Starting two nodes", total=2)
        with interrupts.held():
            machine = Machine(num_nodes=2)
            stack.callback(machine.close)
        progress.update(bar, advance=1, description="Measuring")
        path = machine.write_config({}, cluster_name="bench")
        with interrupts.held():
            play = subprocess.Popen(
                [sys.executable, "-m", _PLAY, str(path), str(num_blocks), str(repeat)],
                env=machine.environ(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends it
            )
            stack.callback(_end, play)
        try:
            output, said = play.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise KVRayError("The bench did not end in time; run it on an idle machine.") from None
        return _found(output, said, num_blocks)


def _found(output: str, said: str, num_blocks: int) -> StagingFound:
    """Return what the play printed last."""
    lines = output.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise KVRayError(f"The bench's nodes failed: {' '.join(said.split()[-60:])}")
    found = json.loads(lines[-1])
    if "error" in found:
        raise KVRayError(found["error"])
    pairs = {
        name: [
            Pair(
                ours=Timing(seconds=seconds, cpu_s=cpu_s),
                floor=Timing(seconds=bare_seconds, cpu_s=bare_cpu_s),
            )
            for seconds, cpu_s, bare_seconds, bare_cpu_s in timings
        ]
        for name, timings in found.items()
    }
    return StagingFound(num_blocks=num_blocks, **pairs)


def _end(play: subprocess.Popen[str]) -> None:
    play.send_signal(signal.SIGKILL)
    play.wait()
    for stream in (play.stdout, play.stderr):
        if stream is not None:
            stream.close()
