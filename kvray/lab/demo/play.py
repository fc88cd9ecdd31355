"""The whole demo: model, tier, phases, verdict. Everything ends with it, however it ends."""

import os
import shutil
import tempfile
from pathlib import Path

import yaml
from rich.console import Console

from kvray.actors.tier.launch import local_tier
from kvray.actors.tier.rollout import Observer
from kvray.client import Client
from kvray.config import environ_for, format_size, load_config
from kvray.console.interrupts import Interrupts
from kvray.console.progress import LaunchProgress, ProgressLine
from kvray.lab.demo.engines import Engines
from kvray.lab.demo.makes import find_make
from kvray.lab.demo.model import fetch_model, is_tiny, read_model
from kvray.lab.demo.phases import ORACLE_PHASE, PHASES
from kvray.lab.demo.prompts import make_prompts
from kvray.lab.demo.record import ORACLE, Record, Verdict, judge

_SHM = Path("/dev/shm")
_ROOM = 1.1
"""Free memory that the demo asks for, in capacities: the tables, and Ray's own share."""


def play(
    model: str, *, engine: str, capacity: int, console: Console, interrupts: Interrupts
) -> tuple[list[Record], Verdict]:
    """Play all phases with a make of engine on a tier of `capacity` bytes, and judge them.

    Raises:
        KVRayError: the model, the tier or an engine did not work.
    """
    make = find_make(engine)
    fetch_model(model)
    with interrupts.closing() as stack:
        with interrupts.held():
            scratch = Path(tempfile.mkdtemp(prefix="kvray-demo-"))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        config_path = _write_config(scratch, capacity, console, model=model)
        settings = load_config(config_path, environ={})
        # A signal is held back until the next report, so that no Ray is left behind.
        with LaunchProgress(console, interrupts) as progress, interrupts.held():
            observer = Observer(waiting=progress.waiting, report=progress.report)
            stack.enter_context(local_tier(settings, observer=observer))
        # Only now: torch starts threads, and there must be none while Ray takes over the signals.
        path, tokenizer = read_model(model, console)
        engines = Engines(
            stack.enter_context(Client(settings)),
            make_prompts(tokenizer),
            model=path,
            make=make,
            environ=environ_for(config_path),
        )
        stack.callback(engines.close)
        with ProgressLine(console) as line:
            for phase in (ORACLE_PHASE, *PHASES):
                title = "" if phase is ORACLE_PHASE else f"Phase {phase.name}: "
                with line.during(title + phase.title, phase.num_steps) as advance:
                    engines.advance = advance
                    phase.play(engines)
    oracle = {record.prompt: record for record in engines.records if record.phase == ORACLE}
    records = [record for record in engines.records if record.phase != ORACLE]
    return records, judge(records, oracle=oracle)


def _write_config(scratch: Path, capacity: int, console: Console, *, model: str) -> Path:
    """Write the tier's configuration; its arena goes to disk where shared memory is too small."""
    directory = _SHM
    if not _SHM.is_dir() or shutil.disk_usage(_SHM).free < _ROOM * capacity:
        directory = scratch
        console.print(
            f"{_SHM} has no room for {format_size(capacity)}; the arena goes to {scratch}."
        )
    settings = {
        "cluster_name": f"demo-{os.getpid()}",
        # Two engines, a shard and Ray may share two cores: wait for a neighbour to be scheduled.
        "arena": {"dir": str(directory), "capacity": capacity, "lock_wait_s": 0.05},
    }
    if is_tiny(model):  # random weights have no checkpoint that tells them apart
        settings["connector"] = {"model_key": model.replace(":", "-")}
    path = scratch / "kvray.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
