"""Command lines of engines' servers, and what becomes of a server whose parent is gone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytest.importorskip("ray.serve")

from kvray.errors import ConfigError, KVRayError
from kvray.serve import Settings
from kvray.serve.server import HOST, EngineServer, command_of
from kvray.vllm import CONNECTOR
from tests.waiting import wait_for


def test_trtllm_serve_reads_the_connector_beside_the_users_options(tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("max_batch_size: 8\nkv_cache_config: {free_gpu_memory_fraction: 0.5}\n")
    settings = Settings(
        engine="tensorrt_llm",
        model="/models/llama",
        options_file=more,
        engine_options={"max_batch_size": 16},
        server_args=["--tp_size", "2"],
        pool_events=True,
    )
    command = command_of(settings, 8123, tmp_path)
    path = tmp_path / "options.yaml"
    at = ["--host", "127.0.0.1", "--port", "8123"]
    options = ["--extra_llm_api_options", str(path)]
    assert command == ["trtllm-serve", "/models/llama", *at, *options, "--tp_size", "2"]
    assert yaml.safe_load(path.read_text()) == {
        "max_batch_size": 16,
        "kv_cache_config": {
            "event_buffer_max_size": 100_000,
            "free_gpu_memory_fraction": 0.5,
            "enable_block_reuse": True,
            "enable_partial_reuse": False,
        },
        "kv_connector_config": {
            "connector_module": "kvray.connector",
            "connector_scheduler_class": "KvRayScheduler",
            "connector_worker_class": "KvRayWorker",
        },
    }


def test_partial_reuse_is_as_the_user_has_it(tmp_path):
    cache = {"enable_block_reuse": False, "enable_partial_reuse": True}
    settings = Settings(engine="tensorrt_llm", model="m", engine_options={"kv_cache_config": cache})
    command_of(settings, 1, tmp_path)
    written = yaml.safe_load((tmp_path / "options.yaml").read_text())["kv_cache_config"]
    assert written == {"enable_block_reuse": True, "enable_partial_reuse": True}


def test_vllm_serve_gets_options_as_flags(tmp_path):
    settings = Settings(
        engine="vllm",
        model="m",
        model_name="mine",
        engine_options={"max_model_len": 512, "enforce_eager": True, "async_scheduling": False},
    )
    at = ["--host", "127.0.0.1", "--port", "1", "--served-model-name", "mine"]
    connector = ["--kv-transfer-config", json.dumps(CONNECTOR)]
    more = ["--max-model-len", "512", "--enforce-eager", "--no-async-scheduling"]
    assert command_of(settings, 1, tmp_path) == ["vllm", "serve", "m", *at, *connector, *more]
    assert CONNECTOR["kv_connector_module_path"] == "kvray.vllm"


def test_a_command_of_the_users_own_takes_its_place(tmp_path):
    settings = Settings(engine="vllm", model="m", command=["mine", "{model}", "--at={host}:{port}"])
    assert command_of(settings, 7, tmp_path) == ["mine", "m", "--at=127.0.0.1:7"]
    wrong = settings.model_copy(update={"command": ["mine", "{ports}"]})
    with pytest.raises(ConfigError, match=r"field that is none .*\{model\}, \{host\}, \{port\}"):
        command_of(wrong, 7, tmp_path)


def test_a_server_that_does_not_start_says_what_it_printed():
    said = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = EngineServer("engine-0", Settings(command=said), env={}, log=None)
    with pytest.raises(KVRayError, match=r"engine-0 has ended\. It last printed: no such model"):
        server.wait_ready(60.0)
    server.close()
    server.close()


def test_no_proxy_stands_between_a_replica_and_its_server(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{HOST}:9")
    (tmp_path / "health").touch()
    served = ["-m", "http.server", "{port}", "--bind", "{host}", "--directory", str(tmp_path)]
    settings = Settings(command=[sys.executable, *served])
    server = EngineServer("engine-0", settings, env={}, log=None)
    server.wait_ready(60.0)
    server.close()


@pytest.mark.parametrize("what", ["log", "process"])
def test_a_server_that_cannot_be_started_leaves_no_directory(tmp_path, monkeypatch, what):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = None if what == "process" else tmp_path
    env = {"A": "\0"} if what == "process" else {}
    with pytest.raises((ValueError, IsADirectoryError)):
        EngineServer("engine-0", Settings(command=["true"]), env=env, log=log)
    assert list(tmp_path.iterdir()) == []


SPAWNS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + "/up", "w").close()
time.sleep(600)
"""
KEEP = (
    "import sys, kvray.serve.keeper as k; k._GRACE_S = 0.5;"
    " sys.exit(k.keep(sys.argv[1], sys.argv[2:]))"
)


@contextmanager
def kept(code: str, where: Path) -> Iterator[Any]:
    """Have a server that runs `code`; give its keeper, and all below that, once it is up."""
    served = [str(where / "files"), sys.executable, "-c", code, str(where)]
    command = [sys.executable, "-c", KEEP, *served]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as keeper:
        wait_for((where / "up").exists, "the server")
        yield keeper, psutil.Process(keeper.pid).children(recursive=True)


@pytest.mark.parametrize("how", ["parent", "group", "itself"])  # Ray kills a worker's children
def test_a_server_ends_with_its_parent_and_all_that_it_started_with_it(tmp_path, how):
    (tmp_path / "files").mkdir()
    code = SPAWNS.replace("sleep(600)\n", "sleep(2)\n") if how == "itself" else SPAWNS
    with kept(code, tmp_path) as (keeper, below):
        if how == "group":
            os.killpg(keeper.pid, signal.SIGKILL)
        elif how == "parent":
            keeper.stdin.close()
            assert keeper.wait(60) == 128 + signal.SIGKILL, "it ignored the milder signal"
        else:
            assert keeper.wait(60) == 0
        gone, alive = psutil.wait_procs(below, timeout=20)
        assert (len(gone), alive) == (3, [])
    assert not (tmp_path / "files").exists()


def test_a_server_ends_with_its_keeper(tmp_path):
    code = "import sys, time; open(sys.argv[1] + '/up', 'w').close(); time.sleep(600)"
    with kept(code, tmp_path) as (_, below):
        below[0].kill()
        assert len(psutil.wait_procs(below, timeout=20)[0]) == 2


LEAVES = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
made = SharedMemory(create=True, size=64)
open(sys.argv[1] + "/named", "w").write(made.name)
open(sys.argv[1] + "/up", "w").close()
time.sleep(600)
"""


def test_shared_memory_of_a_server_that_is_killed_is_removed(tmp_path):
    with kept(LEAVES, tmp_path) as (keeper, (_, server, tracker)):
        left = Path("/dev/shm") / (tmp_path / "named").read_text()
        assert left.exists()
        server.kill()
        assert keeper.wait(60) == 128 + signal.SIGKILL
        assert not left.exists()
        assert not tracker.is_running()
