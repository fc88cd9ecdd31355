"""Shields every test from this machine's Ray, and fails the ones that leave something behind."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests import cleanup, examples, workers

SHM = Path("/dev/shm")
GRACE_S = 20.0
"""How long a resource that is on its way out may take."""
LAST_GRACE_S = 60.0
"""The same at the end of a session: Ray's agents end some seconds after their node."""

LEFT_BY_WORKERS: set[str] = set()
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
CLEANUP: list["subprocess.Popen[bytes]"] = []
"""The process that ends what is left; none in a worker."""

THIRD_PARTY_THREADS = ("tqdm_monitor", "ThreadPoolExecutor", "asyncio_", "PythonGCThread", "ray_")
"""Starts of the names of threads that other packages keep for the life of the process."""


def _pin_environment() -> Path:
    """Give the session its own home, Ray directory and settings; return the directory of both.

    A token that a local `ray.init` writes into the home directory would make the next cluster ask
    for it, and `address="auto"` would find whatever cluster runs here. Downloads keep their cache.
    """
    if IS_WORKER:  # beside that of the session, whose cleanup removes both
        scratch = Path(os.environ[cleanup.MARK] + os.environ["PYTEST_XDIST_WORKER"])
        scratch.mkdir(mode=0o700)
    else:
        scratch = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: Ray's socket paths have a limit
        os.environ[cleanup.MARK] = str(scratch)
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    os.environ["HOME"] = str(scratch)
    os.environ["RAY_TMPDIR"] = str(scratch)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name in list(os.environ):
        if name.startswith("KVRAY_") or name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
            del os.environ[name]
    return scratch


if IS_WORKER:
    workers.take_own_shm()

for _profile in (examples.SOME, examples.ALL):  # a busy machine keeps no deadline
    settings.register_profile(_profile, settings.default, deadline=None)
settings.load_profile(examples.SOME)  # unless the command line names one

# Before any test module imports ray, which reads some of these only once.
SCRATCH = _pin_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make screenshots` keep what the tests of the page show."""
    parser.addoption("--screenshots", metavar="DIR", help="where screenshots are kept")


def pytest_configure() -> None:
    """Let a terminated run end its fixtures, and end whatever is left however it ends."""
    runner = os.getpid()

    def end(signum: int, _frame: object) -> None:
        if os.getpid() == runner:
            signal.signal(signum, lambda *_: None)  # a second one must not cut the clean-up short
            pytest.exit("terminated", returncode=128 + signum)
        signal.signal(signum, signal.SIG_DFL)  # a fork of the runner just dies of it
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, end)
    # A shell lets what runs in its background ignore Ctrl-C, and children inherit that too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not IS_WORKER:
        # pytest-xdist kills workers some seconds after Ctrl-C, and whoever started one of our
        # processes may be killed. The pipe closes with this process.
        CLEANUP.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.cleanup", os.environ[cleanup.MARK]],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        )
        CLEANUP[0].returncode = 0  # it outlives this object, which would warn of that


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers.put_long_ones_first(items)


@pytest.hookimpl(trylast=True)  # when narrower fixtures have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what is large as soon as nobody uses it."""
    workers.end_large_fixtures(item, nextitem)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> workers.ByLane:
    """Keep together what shares fixtures."""
    return workers.ByLane(config, log)


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)
    for process in CLEANUP:
        assert process.stdin is not None
        process.stdin.close()


@pytest.hookimpl(trylast=True)  # after the fixtures of an interrupted session
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session after which a process or a shared-memory file of kvray remains."""
    left = _wait_until_empty(_session_leftovers, LAST_GRACE_S)
    for process in _session_processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.kill()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = sorted(left)
    else:
        left |= LEFT_BY_WORKERS
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("")
            reporter.write_line(f"The session left behind: {', '.join(sorted(left))}", red=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LEFT_BY_WORKERS.update(getattr(node, "workeroutput", {}).get("left", ()))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio, as all of kvray does."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which more is open than before it and its longer-lived fixtures."""
    # Ray opens connections and threads of its own whenever it likes.
    with_ray = request.node.get_closest_marker("ray") is not None
    before = _resources(with_ray=with_ray)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    # A command that ran in this process leaves them ignored, which children would inherit.
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    if left := _wait_until_empty(lambda: _grown(before, _resources(with_ray=with_ray))):
        pytest.fail(f"The test left behind: {', '.join(sorted(left))}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _no_setting_is_left_behind() -> Iterator[None]:
    """Fail a module after which a setting of kvray is in the environment: others would go by it."""
    before = _settings()
    yield
    if left := dict(_settings().items() - before.items()):
        for name in left:
            del os.environ[name]
        pytest.fail(f"The module left behind: {', '.join(sorted(left))}", pytrace=False)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("KVRAY_")}


def _resources(*, with_ray: bool) -> dict[str, str]:
    """Return a description for each identity of what this process holds open now."""
    found = {f"shm:{name}": f"{SHM / name}" for name in _shm_names()}
    for child in _children():
        found[f"child:{child}"] = f"child process {child}"
    for thread in threading.enumerate():
        if not thread.name.startswith(THIRD_PARTY_THREADS):
            found[f"thread:{thread.ident}"] = f"thread {thread.name}"
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) <= 2:
            continue  # pytest's capture exchanges these, also between a test and its fixtures
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own descriptor
        if _is_side_file(target) or target.startswith("/dev/nvidia"):
            continue  # both stay open by design, the latter by CUDA's
        if not with_ray or target.startswith("/"):
            found[f"fd:{fd}:{target}"] = f"descriptor {fd} of {target}"
    return found


def _is_side_file(target: str) -> bool:
    """Return whether `target` is a lock file of an arena, which stays open by design.

    The process keeps one, and each thread that has used the arena's lock (kvray/store/lock.py).
    """
    name = Path(target.removesuffix(" (deleted)")).name
    return name == "owner" or name.startswith("lock.")


def _children() -> list[str]:
    """Return the pids of this process's living children, zombies included."""
    pids: list[str] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                pids += file.read().split()
        except OSError:
            continue  # the thread has ended
    return pids


def _grown(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return what is in `after` alone, less the files that another program has just made."""
    grown = {key: text for key, text in after.items() if key not in before}
    return {
        text
        for key, text in grown.items()
        if not (key.startswith("shm:") and _is_foreign(SHM / key.removeprefix("shm:")))
    }


def _session_leftovers() -> set[str]:
    """Return what lives of the session: processes, and kvray's files that nobody else has open."""
    left = {f"process {process.pid} ({_command(process)})" for process in _session_processes()}
    for name in _shm_names() - SHM_BEFORE:
        if not _is_foreign(SHM / name):
            left.add(str(SHM / name))
    return left


def _shm_names() -> set[str]:
    """Return the names in /dev/shm that kvray or Python's shared memory would give."""
    return {name for name in os.listdir(SHM) if "kvray" in name or name.startswith("psm_")}


SHM_BEFORE = frozenset(_shm_names())


def _session_processes() -> list[psutil.Process]:
    """Return every process of this session, or worker, but this one and the one that cleans up."""
    found = cleanup.processes_of(str(SCRATCH), by="HOME" if IS_WORKER else cleanup.MARK)
    return [process for process in found if process.pid not in {one.pid for one in CLEANUP}]


def _is_foreign(path: Path) -> bool:
    """Return whether a process that is not of this session has `path`, or a file in it, open."""
    ours = {process.pid for process in _session_processes()} | {os.getpid()}
    needle = str(path)
    return any(pid not in ours and needle in _open_files(pid) for pid in psutil.pids())


def _open_files(pid: int) -> str:
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return "\n".join([Path(f"/proc/{pid}/maps").read_text(), *links])
    except OSError:
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:4])
    except psutil.Error:
        return "ended"


def _wait_until_empty(leftovers: Callable[[], set[str]], grace_s: float = GRACE_S) -> set[str]:
    """Return what `leftovers` still gives after a collection and `grace_s`."""
    left = leftovers()
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        left = leftovers()
    return left
