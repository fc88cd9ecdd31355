"""Bad input: one sentence, exit status 2, nothing left behind; and the dashboard's files."""

import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import typer
import yaml

import kvray
from kvray.actors.owner.ownership import as_owner
from kvray.cli.app import app as cli_app
from kvray.cli.app import main as cli_main
from kvray.cli.asking import read_tokens
from kvray.errors import ConfigError
from kvray.lab.bench.serving import load
from kvray.lab.chaos import schedule
from kvray.lab.replay import simulator
from kvray.lab.replay.routers import ROUTERS
from tests import forks
from tests.forks import Done
from tests.unit.actors.shard_process import shard_process
from tests.unit.cli.commands_table import commands

COMMANDS = dict(commands(typer.main.get_command(cli_app)))
PARAMETERS = [(command, one) for command in COMMANDS.values() for one in command.params]


def assert_refused(done: Done, tmp_path: Path, *words: str, kept: Collection[str] = ()) -> None:
    """Fail unless a command was refused in one sentence, and left nothing else behind."""
    forks.assert_refused(done, *words)
    assert {path.name for path in tmp_path.iterdir()} == {*kept}


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as made:
        yield Path(made)


def test_help_names_every_command_and_version_is_the_package_s(call_kvray):
    done = call_kvray("--help")
    assert done.returncode == 0
    assert all(command.split()[0] in done.stdout for command in COMMANDS)
    assert all(panel in done.stdout for panel in ("Run a tier", "Look at it", "Try and measure"))
    assert call_kvray("--version").stdout == f"kvray {kvray.__version__}\n"


def test_help_flows_within_80_columns(call_kvray):
    lines = [line.rstrip() for line in call_kvray("up", "--help", COLUMNS="80").stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    prose = lines[lines.index("", 2) : next(i for i, one in enumerate(lines) if "Options ─" in one)]
    for line, following in itertools.pairwise(prose):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > 79, "broken where the source breaks"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_the_default_of_every_option_but_no_bounds(
    call_kvray, command
):
    done = call_kvray(*command.split(), "--help", COLUMNS="200")
    assert done.returncode == 0
    assert "--verbose" in done.stdout
    assert "Exit status:" in done.stdout
    assert f"kvray {command}" in done.stdout.partition("Examples:")[2], "an example to copy"
    assert "<bool>" not in done.stdout
    assert "<=" not in done.stdout
    flags = {"--help", *(one.opts[0] for _, one in PARAMETERS if getattr(one, "is_flag", False))}
    options = done.stdout.partition("Options ─")[2].partition("\n╰")[0]
    shown = re.split(r"\n│ [* ]*(?=--)", options)[1:]
    assert shown
    for text in shown:
        assert "[default: " in text or "[required]" in text or text.split()[0] in flags, text


HELPS = {f"{command} --help": "Exit status" for command in COMMANDS}


@pytest.mark.parametrize("command", [*HELPS, "--help", "sweep --dry-run"])
def test_a_terminal_for_ascii_alone_gets_every_output(command, monkeypatch, tmp_path):
    (tmp_path / "kvray-h\u00fctte").mkdir()
    monkeypatch.setenv("KVRAY_ARENA__DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["kvray", *command.split()])
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii", write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit, match=r"^(0|None)$"):
            cli_main()
        said = written.getvalue().decode("ascii")
    assert HELPS.get(command, "Run a tier" if "help" in command else r"kvray-h\xfctte") in said


SETS = {
    "replay --policy": simulator.POLICIES,
    "replay --admission": simulator.ADMISSIONS,
    "replay --router": tuple(ROUTERS),
    "bench serve --workload": tuple(load.KINDS),
    "chaos --only": tuple(kind.name for kind in schedule.KINDS),
    "demo --engine": ("reference", "vllm"),
}


@pytest.mark.parametrize("option", SETS)
def test_options_with_a_closed_set_of_values_complete_them(call_kvray, option):
    words = {"COMP_WORDS": f"kvray {option} ", "COMP_CWORD": str(len(option.split()) + 1)}
    done = call_kvray(_KVRAY_COMPLETE="complete_bash", **words)
    assert sorted(done.stdout.split()) == sorted(SETS[option])


def test_unknown_setting_is_refused_with_its_line_and_the_nearest_one(call_kvray, tmp_path):
    (tmp_path / "kvray.yaml").write_text("arena: {capacty: 1GiB}\n")
    for command in ("up", "down", "status", "verify", "sweep", "connector-config", "config show"):
        done = call_kvray(*command.split(), "-c", "kvray.yaml")
        words = ("kvray.yaml:1: ", "did you mean arena.capacity")
        assert_refused(done, tmp_path, *words, kept={"kvray.yaml"})


ENDPOINTS = "Give the endpoints with --url, or --local."


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("up --config nowhere.yaml", ("nowhere.yaml", "cannot be read")),
        ("up --address head", ("'head' is no Ray address",)),
        ("up --address 10.0..5:6379", ("Nobody answers at the Ray address 10.0..5:6379",)),
        ("up --address 127.0.0.1:1", ("Nobody answers at the Ray address 127.0.0.1:1",)),
        ("down --address 127.0.0.1:1", ("Nobody answers at the Ray address 127.0.0.1:1",)),
        ("status --address 127.0.0.1:1", ("Nobody answers at the Ray address 127.0.0.1:1",)),
        ("up --address head:\u00b2", ("is no Ray address",)),
        ("dashboard serve --host 10.0..5", ("cannot listen at 10.0..5 port 8270",)),
        ("up --port 7000 --address 10.0.0.5:6379", ("leave one of the two out",)),
        ("up --dashboard --address 10.0.0.5:6379", ("leave one of the two out",)),
        ("status --watch --json", ("--watch", "--json")),
        ("status", ("'no-such-tier'", "`kvray up`")),
        ("demo --model /no/such/model", ("/no/such/model",)),
        ("demo --arena some", ("--arena", "64GiB")),
        ("size --add 64sheep", ("--add", "64GiB")),
        ("chaos --only quake", ("no kind of fault 'quake'; give one of call_off, cut_link",)),
        ("bench local --capacity much", ("--capacity", "64GiB")),
        ("bench local --capacity 1MiB", ("--capacity 1MiB is too small", "64MiB")),
        ("bench local --capacity 4096TiB", ("TiB", "smaller --capacity, or --quick")),
        ("dashboard install --ray-temp-dir none", ("on the node of Ray's head",)),
        ("dashboard scrape --ray-temp-dir none", ("on the node of Ray's head",)),
        ("dashboard install --to absent", ("absent",)),
        ("bench serve", (ENDPOINTS,)),
        ("bench serve --url a=http://x --local", (ENDPOINTS,)),
        ("bench serve --url a=http://x --url a=http://y", ("the same name",)),
        ("bench serve --url a=http://x --workload none", ("one-prefix",)),
        ("bench serve --local --plot nowhere/figures.png", ("no directory nowhere",)),
        ("bench serve --local --plot figures.pdf", ("figures.pdf",)),
        ("bench nvme --quick --dir /dev/shm", ("kept in memory (tmpfs)", "--dir")),
        ("bench nvme --dir nowhere", ("No such file",)),
        ("bench nvme --dir /dev/null", ("/dev/null (Not a directory); name one", "in --dir.")),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(run_kvray, tmp_path, command, words):
    environ = {"KVRAY_CLUSTER_NAME": "no-such-tier", "KVRAY_ARENA__DIR": str(tmp_path)}
    assert_refused(run_kvray(*command.split(), **environ), tmp_path, *words)


def test_working_directory_that_is_gone_is_said(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from kvray.cli import main; main()"
    environ = {**os.environ, "PYTHONPATH": str(forks.ROOT)}
    done = forks.run(sys.executable, "-c", code, "status", env=environ, cwd=gone)
    assert_refused(done, tmp_path, "The working directory was removed")


FULL = "kvray: stdout cannot be written: No space left on device.\n"
CLOSED = "kvray: stdout is closed; give the command one, or send it to /dev/null.\n"


@pytest.mark.parametrize(
    ("command", "status", "stdout", "stderr"),
    [
        ("--version >/dev/full", 2, "", FULL),
        ("--help >/dev/full", 2, "", FULL),
        ("config show >/dev/full", 2, "", FULL),
        ("config show >&-", 2, "", CLOSED),
        ("config show --json -c none 2>&-", 2, "", ""),
        ("down 2>&-", 0, "No tier no-such-tier was running.\n", ""),
    ],
)
def test_output_that_cannot_be_written_is_said_where_it_can_be(command, status, stdout, stderr):
    environ = {**os.environ, "KVRAY_CLUSTER_NAME": "no-such-tier"}
    done = forks.run("sh", "-c", f"exec {sys.executable} -m kvray {command}", env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (status, stdout, stderr)


def test_reader_that_has_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        command = [sys.executable, "-m", "kvray", "config", "show"]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_port_in_use_and_a_directory_that_ray_cannot_use_are_refused(run_kvray, tmp_path):
    with socket.create_server(("", 0)) as server:  # which is no Ray
        port = server.getsockname()[1]
        done = run_kvray("up", "--port", str(port))
    assert_refused(done, tmp_path, f"Port {port}", "choose another --port")
    (tmp_path / "é").mkdir()
    done = run_kvray("up", TMPDIR=str(tmp_path / "é"))
    assert_refused(done, tmp_path, "set TMPDIR", kept={"é"})


def test_arena_that_cannot_fit_is_refused_before_a_ray_is_started_which_a_plan_says_how_to(
    run_kvray, short_dir
):
    done = run_kvray("up", KVRAY_ARENA__CAPACITY="100TiB", TMPDIR=str(short_dir))
    assert_refused(done, short_dir, "The arena needs", "lower arena.capacity")
    done = run_kvray("up", "--plan", KVRAY_ARENA__CAPACITY="100TiB")
    assert (done.returncode, "is missing" in done.stdout) == (2, True)
    assert "lower arena.capacity" in done.stderr
    environ = {"KVRAY_ARENA__CAPACITY": "64MiB", "KVRAY_SHARD__RESOURCE": "kvray_shard"}
    done = run_kvray("up", "--plan", "--address", "127.0.0.1:1", **environ)
    assert (done.returncode, "Nobody answers" in done.stderr) == (2, True)
    command = "ray start --address=127.0.0.1:1 --object-store-memory=1073741824 --memory="
    assert command in done.stdout
    assert """--resources='{"kvray_shard": 1}'""" in done.stdout


def test_shard_of_another_ray_is_named(run_kvray, short_dir):
    node_dir = short_dir / "kvray-taken"
    node_dir.mkdir(mode=0o700)
    with as_owner(node_dir) as is_owner:
        assert is_owner
        done = run_kvray("up", **_tier_in(short_dir, "taken"))
    assert_refused(done, short_dir, f"owns {node_dir}", "`kvray down`", kept={"kvray-taken"})


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
@pytest.mark.parametrize("command", ["up", "down"])
def test_tier_of_another_user_is_not_taken_for_none(run_kvray, short_dir, command):
    node_dir = short_dir / "kvray-theirs"
    node_dir.mkdir()
    os.chown(node_dir, 65534, 65534)
    done = run_kvray(command, **_tier_in(short_dir, "theirs"))
    assert_refused(done, short_dir, "belongs to another user", kept={"kvray-theirs"})


def _tier_in(directory: Path, name: str) -> dict[str, str]:
    """Return the environment of a tier whose files are all in one directory."""
    where = str(directory)
    return {"KVRAY_CLUSTER_NAME": name, "KVRAY_ARENA__DIR": where, "TMPDIR": where}


def test_every_number_has_bounds_and_is_held_to_them():
    numbers = []
    for command, one in PARAMETERS:
        if one.metavar == "TIME":
            for value in ("1000000d", "nan", "-1s", "1 year", "1" + "0" * 400, "x", ""):
                with pytest.raises(typer.BadParameter, match=r"is no time; write|is not between"):
                    command.make_context(command.name, [one.opts[0], value])
        elif re.search("int|float", str(one.type_descriptor.annotation)):
            numbers.append((command, one))
    assert len(numbers) > 10
    for command, number in numbers:
        assert number.min is not None, (command.name, number.name)
        assert number.max is not None, (command.name, number.name)
        option = [number.opts[0] if number.opts[0].startswith("-") else "--"]
        for value in (number.min - 1, number.max + 1, "nan", "inf", "1" + "0" * 400, "x", ""):
            with pytest.raises(typer.BadParameter) as refused:
                command.make_context(command.name, [*option, str(value)])
            assert refused.value.param is number


def test_clear_asks_first_and_down_without_a_tier_is_fine(call_kvray, run_kvray, tmp_path):
    done = call_kvray("clear")
    assert (done.returncode, "Aborted" in done.stderr) == (1, True)
    done = run_kvray("down", KVRAY_CLUSTER_NAME="no-such-tier")
    assert (done.returncode, done.stdout) == (0, "No tier no-such-tier was running.\n")
    assert list(tmp_path.iterdir()) == []


def test_verbose_shows_where_an_error_came_from(run_kvray):
    done = run_kvray("status", "--verbose", KVRAY_CLUSTER_NAME="no-such-tier")
    assert (done.returncode, "Traceback" in done.stderr) == (2, True)
    assert "ShardUnavailable" in done.stderr


INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == "kvray.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from kvray.__main__ import main
main()
"""


def test_ctrl_c_while_a_command_loads_ends_it_without_a_traceback():
    done = forks.run(sys.executable, "-c", INTERRUPT)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_help_imports_neither_ray_nor_torch():
    code = "import sys, kvray.cli; print({'ray', 'torch', 'numpy'} & set(sys.modules))"
    assert forks.run(sys.executable, "-c", code).stdout == "set()\n"


def test_tokens_are_read_from_a_file_or_stdin_and_what_are_none_is_refused(tmp_path, monkeypatch):
    prompt = tmp_path / "prompt.json"
    with pytest.raises(ConfigError, match=r"prompt\.json cannot be read as token ids"):
        read_tokens(prompt)
    for text in ("[1, 15043, 29871]", "1 15043\n29871\n"):
        prompt.write_text(text)
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        for path in (prompt, Path("-")):
            assert read_tokens(path) == [1, 15043, 29871]
    for text in ("", "Hello", '["1"]', "[true]", '{"tokens": [1]}'):
        prompt.write_text(text)
        with pytest.raises(ConfigError, match=r"prompt\.json (must have|cannot be read as) token"):
            read_tokens(prompt)


def test_an_arena_that_a_shard_of_another_ray_owns_is_left_and_named(run_kvray, parent):
    environ = {"KVRAY_CLUSTER_NAME": "prod", "KVRAY_ARENA__DIR": str(parent)}
    with shard_process(parent / "kvray-prod", "kvray-shard-0") as shard:
        done = run_kvray("down", **environ)
        assert shard.process.poll() is None
    owner = f"kvray: Shard kvray-shard-0 (process {shard.process.pid}, since 20"
    forks.assert_refused(done, owner, "with the --address that it was started with")
    assert run_kvray("down", **environ).stdout == "The tier prod is down.\n"
    assert list(parent.iterdir()) == []


def test_a_dashboard_goes_into_ray_s_latest_session_again_and_again_and_alerts_to_prometheus(
    call_kvray, tmp_path
):
    ray = tmp_path / "ray"
    for name in ("session_1", "session_2"):  # as Ray's dashboard writes them when they start
        providers = ray / name / "metrics" / "grafana" / "provisioning" / "dashboards"
        for directory in (providers, tmp_path / name):
            directory.mkdir(parents=True)
        described = {"providers": [{"name": "Ray", "options": {"path": str(tmp_path / name)}}]}
        (providers / "default.yml").write_text(yaml.safe_dump(described))
        (ray / "session_latest").unlink(missing_ok=True)
        (ray / "session_latest").symlink_to(ray / name)
        for _ in range(2):
            done = call_kvray("dashboard", "install", "--ray-temp-dir", ray)
            assert done.returncode == 0, done.stderr
        assert str(tmp_path / name) in done.stdout
        (path,) = (tmp_path / name).iterdir()
        assert json.loads(path.read_text())["uid"] == "kvray"
    assert "repeat this after a restart" in done.stdout
    needed = yaml.safe_load(call_kvray("dashboard", "scrape", "--ray-temp-dir", ray).stdout)
    (rules,) = needed["rule_files"]
    assert "KvrayCorruptBlocks" in Path(rules).read_text()
    (files,) = needed["scrape_configs"][0]["file_sd_configs"]
    assert files["files"] == [str(ray / "prom_metrics_service_discovery.json")]


def test_a_dashboard_goes_into_any_directory_or_is_printed_and_says_what_it_lacks(
    call_kvray, tmp_path
):
    (tmp_path / "session_latest").mkdir()
    done = call_kvray("dashboard", "install", "--ray-temp-dir", ".")
    assert_refused(done, tmp_path, "--include-dashboard=true", kept={"session_latest"})
    done = call_kvray("dashboard", "install", "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kvray_kvray.json").exists()
    assert "groups:" in call_kvray("dashboard", "rules").stdout
    assert json.loads(call_kvray("dashboard", "show").stdout)["title"] == "kvray"
