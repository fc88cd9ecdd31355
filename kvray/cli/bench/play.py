"""A whole run: processes, measurements, and everything ended again, however it ends."""

from pathlib import Path

from rich.console import Console

from kvray.cli.bench.measurements import MEASUREMENTS
from kvray.cli.bench.results import Result
from kvray.cli.bench.scale import Scale
from kvray.cli.bench.stage import Stage
from kvray.cli.bench.worker import call_all
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import counting_progress


def play(
    scale: Scale, *, directory: Path, console: Console, interrupts: Interrupts
) -> list[Result]:
    """Take all measurements.

    Args:
        scale: how much is measured.
        directory: `arena.dir`; a directory is made in it, and removed.
        console: where progress is shown.
        interrupts: what ends it early.

    Raises:
        KVRayError: there is no room, or a step did not do what it should.
    """
    scale.check_memory(directory)
    results: list[Result] = []
    progress = counting_progress(console)
    with interrupts.closing() as stack, progress:
        bar = progress.add_task("Starting", total=len(MEASUREMENTS))
        stage = Stage(scale, directory=directory, stack=stack, interrupts=interrupts)
        call_all([stage.writer, *stage.readers], "allocate", num_bytes=scale.large_bytes)
        for measurement in MEASUREMENTS:
            progress.update(bar, description=f"Measuring {measurement.title}")
            results += measurement.take(stage)
            progress.advance(bar)
    return results
