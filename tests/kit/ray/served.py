"""kvray.serve as a user has it, the `openai` client, and clients that ask on end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from kvray.reference import Replica
from kvray.reference.tokenizer import ByteTokenizer
from kvray.serve import Settings
from kvray.serve.render import load_prompts
from tests.forks import run
from tests.kit.ray.command_line import ROOT, Shell, free_port, open_shell
from tests.waiting import wait_for

openai = pytest.importorskip("openai")

EXAMPLE = ROOT / "examples" / "ray_serve"
SERVER = "kvray.lab.openai_server"
KEEPER = "kvray.serve.keeper"
DEADLINE_S = 300.0
QUESTION = [
    {"role": "system", "content": "You keep the ledger of a library with three rooms. " * 4},
    {"role": "user", "content": "What is the third room for?"},
]
_SERVE = str(Path(sys.executable).parent / "serve")
_END_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The application, up."""

    shell: Shell
    config: KVRayConfig
    environ: dict[str, str]
    settings: Path
    serve: "subprocess.Popen[bytes]"
    client: Any

    def ask(self, **options: Any) -> Any:
        """Ask for a chat's answer."""
        return ask(self.client, **options)

    def ask_by_name(self, **options: Any) -> tuple[str, Any]:
        """Return the replica that answered, and a chat's answer."""
        raw = ask(self.client.with_raw_response, **options)
        return raw.headers["x-kvray-replica"], raw.parse()

    def shards(self) -> list[dict[str, Any]]:
        """Return what the tier says of its shards."""
        return list(Client(self.config).status()["shards"])

    def connected(self) -> list[str]:
        """Return the replicas that are registered and alive, as the tier says."""
        replicas = [one for shard in self.shards() for one in shard["replicas"]]
        return sorted(one["replica"] for one in replicas if one["connected"])

    def stored(self) -> int:
        """Return how many blocks were stored, ever."""
        return sum(shard["arena"]["stored"] for shard in self.shards())

    def engines(self) -> list[psutil.Process]:
        """Return the engines' processes, also those whose parent is gone."""
        return engines_of(self.environ["KVRAY_CONFIG"])

    def direct(self) -> str:
        """Return where an engine's own server answers, as the client's `base_url`."""
        words = engines_of(self.environ["KVRAY_CONFIG"], KEEPER)[0].cmdline()
        return f"http://127.0.0.1:{words[words.index('--port') + 1]}/v1/"

    def engines_by_name(self, number: int) -> dict[str, psutil.Process]:
        """Return the engines by their names in kvray, once there are so many and all are well."""
        found: dict[str, psutil.Process] = {}

        def are_all() -> bool:
            found.clear()
            found.update({name_of(engine): engine for engine in self.engines()})
            return len(found) == number and sorted(found) == self.connected()

        wait_for(are_all, f"{number} engines")
        return found

    def replicas_by_name(self, number: int) -> dict[str, psutil.Process]:
        """Return the Serve replicas by the names of their engines, likewise."""
        return {
            name: engine.parents()[2]  # between them are the two that keep the server
            for name, engine in self.engines_by_name(number).items()
        }

    def deploy(self, **changes: Any) -> None:
        """Deploy the application again, with changes as for `write_settings`.

        Other arguments make it a new version, of which no engine stays.
        """
        settings = yaml.safe_load(self.settings.read_text())
        _change(*settings["applications"], **changes)
        self.settings.write_text(yaml.safe_dump(settings))
        options = {"cwd": ROOT, "env": {**self.shell.environ, **self.environ}}
        done = run(_SERVE, "run", "--non-blocking", self.settings, timeout=DEADLINE_S, **options)
        assert done.returncode == 0, done.stderr


def ask(client: Any, **options: Any) -> Any:
    """Ask for a chat's answer."""
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, **options}
    return client.chat.completions.create(**asked)


@contextlib.contextmanager
def open_served(
    local: LocalRay, name: str, *, write: Callable[..., int] | None = None, **args: Any
) -> Iterator[Served]:
    """Have a tier and the example's application with `args` for the time of a block.

    `write`, like `write_settings`, may write another application's settings.
    """
    with open_shell(name) as shell:
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
        settings = shell.directory / "serve.yaml"
        port = (write or write_settings)(settings, kvray_config=str(config), **args)
        try:
            with (
                serve_run(settings, port, {**shell.environ, **environ}) as serve,
                open_client(port) as client,
            ):
                yield Served(
                    shell=shell,
                    config=load_config(config, environ={}),
                    environ=environ,
                    settings=settings,
                    serve=serve,
                    client=client,
                )
        finally:
            down = shell.run("down", **environ)
        assert down.returncode == 0, down.stderr
        with tier_named(shell.cluster_name):
            assert list_actors() == []


def write_settings(path: Path, **changes: Any) -> int:
    """Write the example's own serve.yaml for the tiny model; return the port that it names.

    `changes` are other arguments of the application, None to leave one out; `num_blocks`, of an
    engine's pool; `deployment`, of Serve's of the engines; `environ`, of all its processes.
    """
    settings = yaml.safe_load((EXAMPLE / "serve.yaml").read_text())
    (application,) = settings["applications"]
    settings["http_options"]["port"] = port = free_port()
    application["args"].update(engine="reference", model="tiny")
    _change(application, **{"num_blocks": 128, **changes})
    path.write_text(yaml.safe_dump(settings))
    return port


def _change(
    application: dict[str, Any],
    *,
    num_blocks: int | None = None,
    deployment: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **args: Any,
) -> None:
    if num_blocks is not None:
        application["args"]["engine_options"].update(num_blocks=num_blocks)
    if deployment is not None:
        application["deployments"] = [{"name": "Engine", **deployment}]
    if environ is not None:
        application["runtime_env"] = {"env_vars": dict(environ)}
    new = {**application["args"], **args}
    application["args"] = {name: one for name, one in new.items() if one is not None}


@contextlib.contextmanager
def serve_run(
    settings: Path, port: int, environ: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Have `serve run` for the time of a block, from when its endpoint answers."""
    log = settings.with_suffix(".log")
    with log.open("wb") as output:
        serve = subprocess.Popen(
            [_SERVE, "run", str(settings)],
            cwd=ROOT,
            env=dict(environ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: serve.poll() is not None or _answers(port), log)
        assert serve.poll() is None, log.read_text()
        yield serve
    finally:
        end(serve)


def open_client(port: int) -> Any:
    """Return a client of that endpoint, which tries nothing twice."""
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def end(serve: "subprocess.Popen[bytes]") -> None:
    """End Serve as Ctrl-C does; the second time it is gone."""
    if serve.poll() is None:
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(_END_S)
        finally:
            serve.kill()
            serve.wait()


def engines_of(config: str, program: str = SERVER) -> list[psutil.Process]:
    """Return the engines' processes that were told of that kvray.yaml, or their keepers."""
    marker = f"KVRAY_CONFIG={config}\0".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            is_it = program in command and (KEEPER in command) == (program == KEEPER)
            if is_it and marker in _environ(process):
                found.append(process)
    return found


def name_of(engine: psutil.Process) -> str:
    """Return the name of an engine in kvray; empty when it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        _, _, rest = _environ(engine).partition(b"KVRAY_CONNECTOR__REPLICA=")
        return os.fsdecode(rest.partition(b"\0")[0])
    return ""


def _environ(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
            return True
    except OSError:
        return False


MAX_TOKENS = 192
"""A stream takes as long that a fault meets it in the middle."""
_FAMILIES = 16
_HEAD_WORDS = 80
"""About 15 blocks that the prompts of a family share: all of them are more than a pool holds."""
_TAIL_WORDS = 12
_MEMBERS = 12
_WORDS = ("river", "stone", "cloud", "amber", "night", "green", "paper", "quiet", "lantern")


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request, as its client saw it."""

    prompt: str
    began: float
    ended: float = 0.0
    engine: str = ""
    text: str = ""
    num_pieces: int = 0
    from_tier: int = 0
    from_pool: int = 0
    error: str | None = None


class Crowd:
    """So many clients ask, each one request after the other, until it is closed."""

    def __init__(self, served: Served, number: int, *, seed: int) -> None:
        self.asked: list[Asked] = []  # in the order of their ends
        self._served = served
        self._under_way: dict[int, Asked] = {}
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(number)
        self._clients = [
            self._threads.submit(self._ask_on, place, random.Random(f"{seed} {place}"))
            for place in range(number)
        ]

    def wait_for_answers(self, number: int) -> None:
        """Return when so many more requests have ended, whatever their ends."""
        enough = len(self.asked) + number
        wait_for(lambda: len(self.asked) >= enough, f"{number} answers")

    def find_busy(self) -> str:
        """Return the name of an engine that is in the middle of an answer."""
        found: list[str] = []

        def is_one() -> bool:
            under_way = [*self._under_way.values()]
            found.extend(one.engine for one in under_way if 1 <= one.num_pieces < MAX_TOKENS // 4)
            return bool(found)

        wait_for(is_one, "an answer under way")
        return found[0]

    def close(self) -> None:
        """Let each client end its request. Twice is fine."""
        self._is_over.set()
        for client in self._clients:
            client.result(DEADLINE_S)
        self._threads.shutdown()

    def _ask_on(self, place: int, random_: random.Random) -> None:
        while not self._is_over.is_set():
            prompt = prompt_of(random_.randrange(_FAMILIES), random_.randrange(_MEMBERS))
            one = self._under_way[place] = Asked(prompt=prompt, began=time.monotonic())
            try:
                self._ask(one)
            except openai.APIError as error:
                one.error = repr(error)
            one.ended = time.monotonic()
            self.asked.append(one)

    def _ask(self, one: Asked) -> None:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "user", "content": one.prompt}]
        finish_reason = None
        with self._served.ask(messages=messages, max_tokens=MAX_TOKENS, **options) as stream:
            one.engine = stream.response.headers["x-kvray-replica"]
            for chunk in stream:
                for choice in chunk.choices:
                    one.text += choice.delta.content or ""
                    one.num_pieces += 1
                    finish_reason = choice.finish_reason or finish_reason
                if chunk.usage is not None:
                    details = chunk.usage.prompt_tokens_details
                    one.from_pool = details.cached_tokens_by_source["pool"]
                    one.from_tier = details.cached_tokens - one.from_pool
        assert finish_reason is not None, "a stream that just ends says that nothing went wrong"


@contextlib.contextmanager
def crowd_of(served: Served, number: int, *, seed: int) -> Iterator[Crowd]:
    """Have so many clients ask for the time of a block."""
    crowd = Crowd(served, number, seed=seed)
    try:
        yield crowd
    finally:
        crowd.close()


def prompt_of(family: int, member: int) -> str:
    """Return a prompt; those of a family have all but the end in common."""
    head, tail = random.Random(f"head {family}"), random.Random(f"tail {family} {member}")
    return " ".join([*head.choices(_WORDS, k=_HEAD_WORDS), *tail.choices(_WORDS, k=_TAIL_WORDS)])


class Alone:
    """An engine without any cache of blocks, and the answers it gives."""

    def __init__(self) -> None:
        self._prompts = load_prompts(Settings(model="tiny"), engine="reference")
        self._engine = Replica.start(
            "alone", model="tiny", num_threads=1, enable_chunked_prefill=True
        )
        self._answers: dict[str, str] = {}

    def wrong(self, asked: Sequence[Asked]) -> list[Asked]:
        """Return those of the answers that are not what this engine says.

        Of an answer that was broken off its beginning counts.
        """
        return [
            one
            for one in asked
            if (one.text != self._answer(one.prompt))
            and not (one.error is not None and self._answer(one.prompt).startswith(one.text))
        ]

    def close(self) -> None:
        self._engine.close()

    def _answer(self, prompt: str) -> str:
        if prompt not in self._answers:
            tokens = self._prompts.chat({"messages": [{"role": "user", "content": prompt}]})
            # A salt of its own: nothing is reused.
            output = self._engine.generate(tokens.tolist(), max_tokens=MAX_TOKENS, salt=prompt)
            said = b"".join(map(ByteTokenizer().bytes_of, output.token_ids))
            self._answers[prompt] = said.decode(errors="replace")
        return self._answers[prompt]
