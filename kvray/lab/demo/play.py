"""The whole demo: model, tier, phases, verdict. Everything ends with it, however it ends.

The model is found or downloaded first, unpacked and read later.
"""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import yaml
from rich.console import Console

from kvray.actors.tier.launch import local_tier
from kvray.actors.tier.rollout import Observer
from kvray.client import Client
from kvray.config import environ_for, format_size, load_config
from kvray.console.interrupts import Interrupts
from kvray.console.progress import LaunchProgress, ProgressLine
from kvray.errors import ConfigError
from kvray.lab.demo.engines import ORACLE_PHASE, PHASES, Engines, find_make
from kvray.lab.demo.prompts import make_prompts
from kvray.lab.demo.record import ORACLE, Record, Verdict, judge
from kvray.reference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from kvray.reference.weights import find_weights

_SMOLLM2 = "smollm2"
_ROOM = 1.1
"""Free memory that the demo asks for, in capacities: the tables, and Ray's own share."""


def is_tiny(model: str) -> bool:
    """Return whether a model is random weights, which exist in memory only."""
    return model.partition(":")[0] == "tiny"


def fetch_model(model: str) -> None:
    """Make sure that the model is on this machine.

    Raises:
        ConfigError: there is no such model, its download failed, or a package is missing.
    """
    missing = [name for name in ("accelerate", "gguf", "transformers") if not find_spec(name)]
    if missing:
        raise ConfigError(
            f"The demo's engines need {', '.join(missing)}; run `pip install 'kvray[demo]'`."
        )
    if model == _SMOLLM2:
        find_weights()  # shows a bar if it has to download them
    elif not is_tiny(model) and not Path(model).expanduser().exists():
        raise ConfigError(
            f"There is no model at {model}; give smollm2, tiny, or the path of a Llama-family"
            " checkpoint (a directory or a .gguf file)."
        )


def read_model(model: str, console: Console) -> tuple[str, Tokenizer]:
    """Return the name or path that engines load, and the tokenizer.

    Raises:
        ConfigError: the model cannot be read, or cannot be unpacked into the cache.
    """
    if is_tiny(model):
        return model, ByteTokenizer()
    with console.status("Reading the model"):
        path = Path(model).expanduser().absolute()
        if model == _SMOLLM2:
            from kvray.reference.checkpoint import find_smollm2  # imports torch

            path = find_smollm2()
        try:
            return str(path), load_tokenizer(path)
        except (OSError, ValueError) as error:  # transformers raises both
            raise ConfigError(f"The tokenizer at {path} cannot be read: {error}") from None


_SHM = Path("/dev/shm")


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
