"""Bad input: one sentence, exit status 2, nothing left behind."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvray
from tests.unit.cli.conftest import RunKvray

COMMANDS = (
    *("up", "down", "status", "verify", "clear", "sweep", "connector-config", "demo", "replay"),
    *("doctor", "probe", "upgrade", "explain", "ls", "top", "prefetch"),
    *("bench local", "bench connector", "bench gpu"),
    *("config show", "config fit", "config schema"),
    *("dashboard install", "dashboard scrape", "dashboard rules", "dashboard show"),
)


def assert_refused(
    done: "subprocess.CompletedProcess[str]",
    tmp_path: Path,
    *words: str,
    kept: set[str] = frozenset(),
) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kvray: ")
    assert done.stderr.count("\n") == 1, "one sentence"
    for word in words:
        assert word in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def open_port() -> Iterator[int]:
    """A port in use, by something that is no Ray."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_help_names_every_command(run_kvray: RunKvray) -> None:
    done = run_kvray("--help")
    assert done.returncode == 0
    assert all(command.split()[0] in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run_kvray: RunKvray, command: str) -> None:
    done = run_kvray(*command.split(), "--help")
    assert done.returncode == 0
    assert "--verbose" in done.stdout
    assert "Examples:" in done.stdout or " " in command, "commands of a group explain each other"


def test_version_is_the_package_s(run_kvray: RunKvray) -> None:
    assert run_kvray("--version").stdout == f"kvray {kvray.__version__}\n"


@pytest.mark.parametrize(
    "args", [["nonsense"], ["up", "--nonsense"], ["up", "--port", "0"], ["up", "--port", "high"]]
)
def test_wrong_usage_exits_with_2(run_kvray: RunKvray, args: list[str]) -> None:
    done = run_kvray(*args)
    assert done.returncode == 2
    assert "Usage: kvray" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["up", "down", "status", "verify", "sweep", "connector-config"])
def test_unknown_setting_is_refused_with_the_nearest_one(
    run_kvray: RunKvray, tmp_path: Path, command: str
) -> None:
    (tmp_path / "kvray.yaml").write_text("arena: {capacty: 1GiB}\n")
    done = run_kvray(command, "-c", "kvray.yaml")
    assert_refused(done, tmp_path, "did you mean arena.capacity", kept={"kvray.yaml"})


@pytest.mark.parametrize("size", ["-1GiB", "-5", "0", "much"])
def test_size_that_is_none_is_refused(run_kvray: RunKvray, tmp_path: Path, size: str) -> None:
    (tmp_path / "kvray.yaml").write_text(f"arena: {{capacity: {size}}}\n")
    done = run_kvray("up", "-c", "kvray.yaml")
    assert_refused(done, tmp_path, "arena.capacity", "64GiB", kept={"kvray.yaml"})


def test_missing_configuration_is_named(run_kvray: RunKvray, tmp_path: Path) -> None:
    done = run_kvray("up", "--config", "nowhere.yaml")
    assert_refused(done, tmp_path, "nowhere.yaml", "cannot be read")


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_dead_ray_address_is_named(
    run_kvray: RunKvray, tmp_path: Path, closed_port: int, command: str
) -> None:
    address = f"127.0.0.1:{closed_port}"
    done = run_kvray(command, "--address", address)
    assert_refused(done, tmp_path, f"Nobody answers at the Ray address {address}")


def test_address_that_is_none_is_refused(run_kvray: RunKvray, tmp_path: Path) -> None:
    assert_refused(run_kvray("up", "--address", "head"), tmp_path, "'head' is no Ray address")


def test_port_in_use_is_refused(run_kvray: RunKvray, tmp_path: Path, open_port: int) -> None:
    done = run_kvray("up", "--port", str(open_port))
    assert_refused(done, tmp_path, f"Port {open_port}", "choose another --port")


def test_port_and_address_exclude_each_other(run_kvray: RunKvray, tmp_path: Path) -> None:
    done = run_kvray("up", "--port", "7000", "--address", "10.0.0.5:6379")
    assert_refused(done, tmp_path, "leave one of the two out")


def test_status_without_a_tier_says_how_to_start_one(run_kvray: RunKvray, tmp_path: Path) -> None:
    done = run_kvray("status", KVRAY_CLUSTER_NAME="no-such-tier")
    assert_refused(done, tmp_path, "'no-such-tier'", "`kvray up`")


def test_down_without_a_tier_is_fine(run_kvray: RunKvray, tmp_path: Path) -> None:
    done = run_kvray("down", KVRAY_CLUSTER_NAME="no-such-tier")
    assert done.returncode == 0
    assert done.stdout == "No tier no-such-tier was running.\n"
    assert list(tmp_path.iterdir()) == []


def test_demo_refuses_a_model_that_is_not_there(run_kvray: RunKvray, tmp_path: Path) -> None:
    assert_refused(run_kvray("demo", "--model", "/no/such/model"), tmp_path, "/no/such/model")


def test_demo_refuses_a_size_that_is_none(run_kvray: RunKvray, tmp_path: Path) -> None:
    assert_refused(run_kvray("demo", "--arena", "some"), tmp_path, "--arena", "64GiB")


def test_verbose_shows_where_an_error_came_from(run_kvray: RunKvray) -> None:
    done = run_kvray("status", "--verbose", KVRAY_CLUSTER_NAME="no-such-tier")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "ShardUnavailable" in done.stderr


def test_help_imports_neither_ray_nor_torch() -> None:
    code = "import sys, kvray.cli; print({'ray', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
