"""`kvray dashboard serve` as a user starts and ends it; there is no tier."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvray.cli.page.command import _announce, _listening
from tests.forks import RunKvray
from tests.waiting import HANG_S


@contextmanager
def serving(tmp_path: Path, *args: str) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """Give a running server and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvray", "dashboard", "serve", "--port", "0", *args],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("The page is at http://"), process.stderr
        yield process, said.split()[4]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_page_is_served_until_a_signal_and_leaves_no_process(
    tmp_path: Path, signum: signal.Signals
) -> None:
    with serving(tmp_path) as (process, address):
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert b"<title>kvray</title>" in answer.read()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (0, "")
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_port_in_use_is_one_sentence(run_kvray: RunKvray) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run_kvray("dashboard", "serve", "--port", str(other.getsockname()[1]))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Address already in use" in done.stderr
    assert "--port" in done.stderr


def test_missing_package_is_one_sentence(run_kvray: RunKvray, tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('fastapi')")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', Path.cwd())}"
    done = run_kvray("dashboard", "serve", PYTHONPATH=path)
    assert done.returncode == 2
    assert "pip install 'kvray[dashboard]'" in done.stderr


def test_address_that_others_reach_is_warned_of(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0") as (process, _):
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert stderr.startswith("kvray: whoever reaches 0.0.0.0 can read the page")


@pytest.mark.parametrize(
    ("host", "others"),
    [
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("::", ["::1", "127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_it_listens_at_addresses_of_both_kinds(host: str, others: list[str]) -> None:
    with _listening(host, 0) as listener:
        for other in others:
            socket.create_connection((other, listener.getsockname()[1])).close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_is_printed_in_brackets(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _announce(host, "::1", 8270, has_token=False)
    assert capsys.readouterr().out == "The page is at http://[::1]:8270/ until Ctrl-C.\n"
