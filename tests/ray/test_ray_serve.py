"""Two replicas behind Ray Serve, as a user of the example has them: over HTTP, with `openai`."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from kvray import Client
from kvray.actors.ray_glue.calls import list_actors, tier_named
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig, load_config
from tests.ray.command_line import ROOT, Shell, open_shell
from tests.ray.conftest import actor_process

openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

EXAMPLE = ROOT / "examples" / "ray_serve"
CHILD = "kvray.lab.reference.replica_child"
BLOCK = 32
LONG_TOKENS = 3000
DEADLINE_S = 180.0
TIMEOUT_S = 30.0
QUESTION = [
    {"role": "system", "content": "You keep the ledger of a library with three rooms. " * 4},
    {"role": "user", "content": "What is the third room for?"},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The application, up."""

    shell: Shell
    config: KVRayConfig
    environ: dict[str, str]
    serve: "subprocess.Popen[bytes]"
    client: Any

    def ask(self, replica: str | None = None, **options: Any) -> Any:
        """Ask for a chat's answer, of one replica if it is named."""
        asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, **options}
        headers = {} if replica is None else {"x-kvray-replica": replica}
        return self.client.chat.completions.create(**asked, extra_headers=headers)

    def hit_tokens(self, replica: str) -> int:
        """Return how many tokens the tier says that a replica has found in it."""
        replicas = [one for shard in self._shards() for one in shard["replicas"]]
        (found,) = [one["counters"] for one in replicas if one["replica"] == replica]
        return int(found.get("hit_tokens", 0))  # a replica counts when it has been asked

    def stored(self) -> int:
        """Return how many blocks were stored, ever."""
        return sum(shard["arena"]["stored"] for shard in self._shards())

    def _shards(self) -> list[dict[str, Any]]:
        return list(Client(self.config).status()["shards"])

    def engines(self) -> list[psutil.Process]:
        """Return the engines' processes, also those whose parent is gone."""
        marker = f"KVRAY_CONFIG={self.environ['KVRAY_CONFIG']}\0".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if CHILD in process.cmdline():
                    found += [process] if marker in _environ(process) else []
        return found


@pytest.fixture(scope="module")
def served(local: LocalRay) -> Iterator[Served]:
    with open_shell("serve") as shell:
        config = shell.directory / "kvray.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "cluster_name": shell.cluster_name,
                    "arena": {"capacity": "64MiB", "slab": "16MiB", "lock_wait_s": 0.05},
                    "connector": {"model_key": "tiny"},
                    "shard": {"heartbeat_s": 0.1},
                    "ray": {"address": local.address},
                }
            )
        )
        environ = {**local.environ(), "KVRAY_CONFIG": str(config)}
        up = shell.run("up", **environ)
        assert up.returncode == 0, up.stderr
        port = _free_port()
        log = shell.directory / "serve.log"
        with log.open("wb") as output:
            serve = subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", _settings(shell, port)],
                cwd=ROOT,
                env={**shell.environ, **environ},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait_for(lambda: serve.poll() is not None or _answers(url), log)
            assert serve.poll() is None, log.read_text()
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                yield Served(
                    shell=shell,
                    config=load_config(config, environ={}),
                    environ=environ,
                    serve=serve,
                    client=client,
                )
        finally:
            _end(serve)
            down = shell.run("down", **environ)
        assert down.returncode == 0, down.stderr
        with tier_named(shell.cluster_name):
            assert list_actors() == []


def _settings(shell: Shell, port: int) -> str:
    """Write the example's own serve.yaml for the tiny model."""
    settings = yaml.safe_load((EXAMPLE / "serve.yaml").read_text())
    settings["http_options"]["port"] = port
    args = settings["applications"][0]["args"]
    args.update(engine="reference", model="tiny", kvray_config=str(shell.directory / "kvray.yaml"))
    # One at a time: what a client has left must have ended before the next begins.
    args.update(requests_max=1, queued_max=1)
    args["engine_options"].update(num_blocks=128)
    path = shell.directory / "serve.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5):
            return True
    except OSError:
        return False


def _wait_for(condition: Callable[[], object], what: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: it did not happen in time"
        time.sleep(0.1)


def _end(serve: "subprocess.Popen[bytes]") -> None:
    """End Serve as Ctrl-C does; the second time it is gone."""
    if serve.poll() is None:
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(90)
        finally:
            serve.kill()
            serve.wait()


def test_the_second_replica_gives_the_same_answer_with_a_hit(served: Served) -> None:
    stored = served.stored()
    first = served.ask("engine-0")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    num_blocks = first.usage.prompt_tokens // BLOCK
    _wait_for(lambda: served.stored() >= stored + num_blocks, "the save")
    second = served.ask("engine-1")
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.choices[0].finish_reason == "length"
    shareable = (first.usage.prompt_tokens - 1) // BLOCK * BLOCK
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == shareable
    assert details.cached_tokens_by_source == {"pool": 0, "tier": shareable}
    _wait_for(lambda: served.hit_tokens("engine-1") == shareable, "the count")
    assert served.hit_tokens("engine-0") == 0
    shown = served.shell.run("status", **served.environ)
    assert "engine-1" in shown.stdout


def test_requests_go_round_and_answers_name_their_replica(served: Served) -> None:
    asked = served.client.chat.completions.with_raw_response
    seen = [
        asked.create(model="tiny", messages=QUESTION, max_tokens=1).headers["x-kvray-replica"]
        for _ in range(4)
    ]
    assert sorted(seen) == ["engine-0", "engine-0", "engine-1", "engine-1"]
    assert [model.id for model in served.client.models.list()] == ["tiny"]


def test_health_says_that_an_engine_can_answer(served: Served) -> None:
    root = str(served.client.base_url).removesuffix("v1/")
    with urllib.request.urlopen(f"{root}health", timeout=TIMEOUT_S) as answer:
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')


def test_a_stream_is_the_same_text_in_pieces(served: Served) -> None:
    whole = served.ask().choices[0].message.content
    chunks = list(served.ask(stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == whole
    assert sum(map(bool, pieces)) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 24)


def test_a_text_is_completed_whole_in_pieces_and_up_to_a_stop(served: Served) -> None:
    complete = served.client.completions.create
    prompt = "Once upon a time there was a library. " * 3
    whole = complete(model="tiny", prompt=prompt, max_tokens=24)
    text = whole.choices[0].text
    chunks = list(complete(model="tiny", prompt=prompt, max_tokens=24, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    tokens = [3 + byte for byte in prompt.encode()]  # as the tiny model's tokenizer has them
    assert complete(model="tiny", prompt=tokens, max_tokens=24).choices[0].text == text
    stop = text[8:10]
    stopped = complete(model="tiny", prompt=prompt, max_tokens=24, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    chunks = list(complete(model="tiny", prompt=prompt, max_tokens=24, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]


def test_what_cannot_be_done_is_said_in_openais_shape(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        served.ask(model="gpt-5")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="engine-0, engine-1"):
        served.ask("engine-7")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        served.client.embeddings.create(model="tiny", input="text", encoding_format="float")
    with pytest.raises(openai.BadRequestError, match=r"temperature=0\.7 is not supported"):
        served.ask(temperature=0.7)
    with pytest.raises(openai.BadRequestError, match="do not fit"):
        served.ask(max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="do not fit"):
        list(served.ask(max_tokens=100_000, stream=True))
    with pytest.raises(openai.BadRequestError) as empty:
        served.ask(messages=[])
    assert (empty.value.type, empty.value.param) == ("invalid_request_error", "messages")


def test_a_client_that_goes_away_ends_its_request(served: Served) -> None:
    stored = served.stored()
    with served.ask("engine-0", max_tokens=LONG_TOKENS, stream=True) as stream:
        next(iter(stream))
    served.ask("engine-0", max_tokens=1)  # begins when the other has ended
    assert served.stored() - stored < LONG_TOKENS // BLOCK // 2


def test_a_request_too_many_is_told_to_come_later(served: Served) -> None:
    with (
        ThreadPoolExecutor(2) as threads,
        served.ask("engine-0", max_tokens=LONG_TOKENS, stream=True) as running,
    ):
        next(iter(running))
        asked = [threads.submit(served.ask, "engine-0", max_tokens=1) for _ in range(2)]
        (refused,), (queued,) = wait(asked, DEADLINE_S, FIRST_COMPLETED)
        error = refused.exception()
        assert isinstance(error, openai.RateLimitError)
        assert error.code == "overloaded"
        running.close()
        assert queued.result(DEADLINE_S).choices[0].finish_reason == "length"


def test_a_tier_that_is_frozen_delays_a_request_by_the_deadline_only(
    served: Served, local: LocalRay
) -> None:
    lookup = actor_process(local, "Lookup")
    before = served.ask("engine-1").choices[0].message.content
    lookup.suspend()
    try:
        began = time.monotonic()
        assert served.ask("engine-1").choices[0].message.content == before
        assert time.monotonic() - began < 10
    finally:
        lookup.resume()


def test_without_the_tier_the_same_answers_come(served: Served) -> None:
    before = served.ask().choices[0].message.content
    assert served.shell.run("down", **served.environ).returncode == 0
    began = time.monotonic()
    assert served.ask("engine-0").choices[0].message.content == before
    assert served.ask("engine-1").choices[0].message.content == before
    assert time.monotonic() - began < 30
    assert served.shell.run("up", **served.environ).returncode == 0


def test_an_engine_ends_with_its_serve_replica_and_requests_go_on(
    served: Served, local: LocalRay
) -> None:
    replica = actor_process(local, "ServeReplica:kvray:engine-0")
    (child,) = [one for one in served.engines() if one.ppid() == replica.pid]
    replica.kill()
    assert served.ask().choices[0].finish_reason == "length"
    _wait_for(lambda: not child.is_running(), "the engine's end")
    assert served.ask("engine-0").choices[0].finish_reason == "length"


def test_the_end_of_serve_leaves_no_engine(served: Served) -> None:
    assert len(served.engines()) == 2
    _end(served.serve)
    _wait_for(lambda: not served.engines(), "the engines' end")


def _environ(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()
