"""The whole demo: model, tier, phases, verdict; and everything ended again, however it ends."""

import os
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from kvray.actors.launch import local_tier
from kvray.cli.demo import report
from kvray.cli.demo.model import fetch_model, is_tiny, read_model
from kvray.cli.demo.phases import ORACLE_PHASE, PHASES, oracle_answers
from kvray.cli.demo.prompts import make_prompts
from kvray.cli.demo.record import Record, Verdict, judge
from kvray.cli.demo.stage import TOKENS_PER_BLOCK, Stage, config_text
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import LaunchProgress
from kvray.client import Client
from kvray.config import environ_for, format_size, load_config

_SHM = Path("/dev/shm")
_SPARE = 1.1
"""Room wanted, in capacities: the tables, and Ray's own share."""
_THREADS_MAX = 4


def play(
    model: str, *, capacity: int, console: Console, interrupts: Interrupts
) -> tuple[list[Record], Verdict]:
    """Play all phases and judge them.

    Args:
        model: `smollm2`, `tiny` or the path of a checkpoint.
        capacity: bytes of the tier.
        console: where progress is shown.
        interrupts: what ends it early.

    Raises:
        KVRayError: the model, the tier or an engine did not work.
    """
    fetch_model(model)
    with interrupts.closing() as stack:
        with interrupts.held():
            scratch = Path(tempfile.mkdtemp(prefix="kvray-demo-"))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        config_path = _write_config(scratch, capacity, console, model=model)
        settings = load_config(config_path, environ={})
        # Held back, a signal is seen at the next report: no Ray is lost sight of.
        with LaunchProgress(console, interrupts) as progress, interrupts.held():
            stack.enter_context(
                local_tier(settings, waiting=progress.waiting, report=progress.report)
            )
        # Only now: torch starts threads, and there must be none while Ray takes over the signals.
        path, tokenizer = read_model(model, console)
        prompts = make_prompts(tokenizer, tokens_per_block=TOKENS_PER_BLOCK)
        stage = Stage(
            stack.enter_context(Client(settings)),
            model=path,
            environ=environ_for(config_path),
            num_threads=min(_THREADS_MAX, len(os.sched_getaffinity(0))),
        )
        stack.callback(stage.close)
        phases = (ORACLE_PHASE, *PHASES)
        with report.Bars(console, phases) as bars:
            for phase in phases:
                with bars.during(phase) as stage.advance:
                    phase.play(stage, prompts)
    oracle = oracle_answers(stage)
    return stage.records, judge(stage.records, oracle=oracle)


def _write_config(scratch: Path, capacity: int, console: Console, *, model: str) -> Path:
    """Write the tier's configuration; its arena goes to disk where shared memory is too small."""
    directory = _SHM
    if not _SHM.is_dir() or shutil.disk_usage(_SHM).free < _SPARE * capacity:
        directory = scratch
        console.print(
            f"{_SHM} has no room for {format_size(capacity)}; the arena goes to {scratch}."
        )
    path = scratch / "kvray.yaml"
    path.write_text(
        config_text(
            cluster_name=f"demo-{os.getpid()}",
            directory=directory,
            capacity=capacity,
            model_key=model.replace(":", "-") if is_tiny(model) else None,
        )
    )
    return path
