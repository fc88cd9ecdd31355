"""Programs on mounts of their own, which nobody else sees and which end with them."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_NR_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")

_MOUNT_AND_RUN = 'mount -t "$1" -o "$2" kvray-test "$3" || exit 77; shift 3; exec "$0" -c "$@"'


def run_mounted(program: str, *, kind: str, options: str) -> str:
    """Run a Python program with its directory `mounted` on a new mount; return what it printed.

    Skips the test where nothing can be mounted.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    with tempfile.TemporaryDirectory(prefix="kvray-mount-") as point:
        code = f"from pathlib import Path\nmounted = Path({point!r})\n{program}"
        script = ["sh", "-c", _MOUNT_AND_RUN, sys.executable, kind, options, point, code]
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", *script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """Set so many huge pages aside; skips the test where there are not so many."""
    if os.geteuid() != 0 or not _NR_HUGE_PAGES.exists():
        pytest.skip("needs root and huge pages")
    before = _NR_HUGE_PAGES.read_text()
    try:
        _NR_HUGE_PAGES.write_text(str(int(before) + count))
        if int(_NR_HUGE_PAGES.read_text()) < int(before) + count:
            pytest.skip("the machine's memory is too much in pieces for huge pages")
        yield
    finally:
        _NR_HUGE_PAGES.write_text(before)
