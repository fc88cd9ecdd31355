"""`make gpu`: everything that only a GPU can show, the most telling first, each with a deadline.

It needs no network and installs nothing: what is missing lies in `build/gpu-wheels`, where
`make gpu-wheels` has put it. What is known is written after each step, to `gpu.json` and `gpu.txt`.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "gpu-wheels"
_LAST_S = 10.0
"""For what a step has said last; whatever else still has its output is not waited for."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# Name -> seconds that it may take, and what Python is told to run; nothing: measurements.
STEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tests": (150, (*PYTEST, "tests/gpu", "--ignore=tests/gpu/test_engine.py")),
    "copies": (120, ()),
    "prompts": (180, ()),
    "engine": (120, (*PYTEST, "tests/gpu/test_engine.py")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--cpu", action="store_true", help="the same, small, without a GPU")
    parser.add_argument("--only", choices=STEPS, action="append", help="this step; may be repeated")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.out, is_cpu=options.cpu)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvray-gpu-") as packages:
        unpack_missing(Path(packages))
        return run_all(options.only or list(STEPS), options.out, packages, is_cpu=options.cpu)


def unpack_missing(packages: Path) -> None:
    """Unpack the wheels of what this Python does not have."""
    for wheel in WHEELS.glob("*.whl"):
        try:
            metadata.distribution(wheel.name.partition("-")[0])
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)


def run_all(names: list[str], out: Path, packages: str, *, is_cpu: bool) -> int:
    """Run steps, and keep what each has found; return 1 if one has failed."""
    versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
    found: dict[str, Any] = {**versions, **card()}
    (out / "gpu.txt").write_text(f"{json.dumps(found, indent=1)}\n")
    for name in names:
        found[name] = run(name, out, packages, is_cpu=is_cpu)
        (out / "gpu.json").write_text(f"{json.dumps(found, indent=1)}\n")
    failed = [name for name in names if not found[name]["has_passed"]]
    print(f"\nFailed: {', '.join(failed) or 'nothing'}. All of it is in {out}.")
    return 1 if failed else 0


def card() -> dict[str, str]:
    """Return what the card and its driver are called; nothing where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    name, _, driver = told.splitlines()[0].partition(", ")
    return {"card": name, "driver": driver}


def run(name: str, out: Path, packages: str, *, is_cpu: bool) -> dict[str, Any]:
    """Run one step, its output on the screen and in `gpu.txt`; return how it went."""
    seconds, command = STEPS[name]
    if not command:
        command = (__file__, "--measure", name, "--out", str(out), *["--cpu"] * is_cpu)
    began, figures = time.monotonic(), out / f"{name}.json"
    figures.unlink(missing_ok=True)
    paths = str(ROOT), packages, os.environ.get("PYTHONPATH")
    tee = subprocess.Popen(["tee", "-a", str(out / "gpu.txt")], stdin=subprocess.PIPE)
    assert tee.stdin is not None
    tee.stdin.write(f"\n== {name}, at most {seconds} s\n".encode())
    tee.stdin.flush()
    step = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=tee.stdin,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status: int | str = step.wait(seconds)
    except subprocess.TimeoutExpired:
        status = f"not done after {seconds} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)  # also what it has left, which would keep `tee`
        step.wait()
        try:
            tee.communicate(timeout=_LAST_S)
        except subprocess.TimeoutExpired:
            tee.kill()
            tee.wait()
    return {
        "has_passed": status in (0, 5),  # 5: on a CPU no test is left
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "figures": json.loads(figures.read_text()) if figures.is_file() else {},
    }


def measure(kind: str, out: Path, *, is_cpu: bool) -> None:
    """Take the measurements of `kvray bench gpu` of one kind, and leave their figures."""
    from kvray.config import load_config
    from kvray.console.interrupts import Interrupts
    from kvray.lab.bench.gpu import GpuScale, measure_gpu
    from kvray.lab.bench.gpu_copies import GpuDevice
    from kvray.lab.runner import running

    scale = GpuScale(pairs=15, prefill_pairs=3)
    if is_cpu:
        scale = GpuScale(model="tiny", lengths=(512, 1024), num_blocks=4, pairs=2, prefill_pairs=1)
    device = GpuDevice("cpu" if is_cpu else "cuda:0")
    with running(Interrupts()) as runner:
        report = measure_gpu(
            scale, device, arena_dir=load_config().arena.dir, runner=runner, kinds=(kind,)
        )
    (out / f"{kind}.json").write_text(json.dumps(report.facts))
    report.show(as_json=False)
    if report.facts["wrong_answers"]:
        sys.exit("Answers were wrong.")


if __name__ == "__main__":
    sys.exit(main())
