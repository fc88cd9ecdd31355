import os
import subprocess
import sys
from pathlib import Path

from tests import cleanup
from tests.waiting import HANG_S, wait_for

ROOT = Path(__file__).parents[2]
DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True)"


def test_what_a_session_leaves_ends_with_it_daemons_and_directories_too(tmp_path):
    session, worker, other = (tmp_path / name for name in ("kvt-a", "kvt-agw0", "kvt-b"))
    for directory in (session, worker, other):
        directory.mkdir()
    environ = {**os.environ, cleanup.MARK: str(session)}
    script = f"{DAEMON}; time.sleep({HANG_S})"
    daemon = subprocess.Popen(
        [sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    with daemon.stdout as said:
        said.readline()
    daemon.wait(HANG_S)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cleanup", session], cwd=ROOT, stdin=subprocess.PIPE
    ) as process:
        wait_for(lambda: cleanup.processes_of(str(session)), "the daemon's mark")
        process.communicate(timeout=HANG_S)  # closes its input
    assert cleanup.processes_of(str(session)) == []
    assert [one.name for one in tmp_path.iterdir()] == ["kvt-b"]
