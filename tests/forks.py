"""Runs commands of kvray in forks of one process that has imported them.

An interpreter that imports the command line costs a second of CPU, a fork some milliseconds, and
the command has a process of its own all the same: environment, directory, output and exit status.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

Done = subprocess.CompletedProcess[str]
RunKvray = Callable[..., Done]
"""Takes the command's arguments, and variables by keyword."""


def run(*command: str | Path, **options: Any) -> Done:
    """Run any command to its end, and return its status and what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def assert_refused(done: Done, *words: str) -> None:
    """Fail unless a command was refused in one sentence that has these words."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kvray: ")
    assert done.stderr.count("\n") == 1, "one sentence"
    for word in words:
        assert word in done.stderr


@contextmanager
def running_kvray(
    *args: str | Path, cwd: Path | None = None, **environ: str
) -> "Iterator[subprocess.Popen[str]]":
    """Have a command of kvray run beside the block, in an interpreter of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvray", *args],
        env={**os.environ, **environ},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Forks:
    """The process that forks; `close` ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, args: list[str], environ: Mapping[str, str], directory: Path) -> Done:
        """Run `kvray` with `args`, and return what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            places = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            asked = [args, dict(environ), str(directory), *places]
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            for file in (out, err):
                file.seek(0)
            return Done(["kvray", *args], status, out.read().decode(), err.read().decode())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Carry out requests, a line each, until standard input ends."""
    from kvray import cli

    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _be_kvray(cli.main, *json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, flush=True)


def _be_kvray(main, args, environ, directory, stdout, stderr) -> None:  # type: ignore[no-untyped-def]
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, stdout), (2, stderr)):
            os.dup2(os.open(path, os.O_WRONLY), number)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = ["kvray", *args]
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - this is the top of a process
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = status or 120  # as Python itself ends then
        os._exit(status)


if __name__ == "__main__":
    main()
