"""The process that asks the tier for the page; it writes each answer as a line of JSON.

A process that is connected to Ray may hang, or be ended by Ray, when the cluster goes. The page's
own process must not. Each line that comes in says that somebody looks at the page.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from kvray.actors.owner.admin import ask_to_be_admitted
from kvray.actors.ray_glue.calls import tier_named
from kvray.cli.page.board import CONTENTS, EVERY_S, REQUESTS, STATUS
from kvray.client import Client
from kvray.config import KVRayConfig, load_config
from kvray.errors import ConfigError, KVRayError

_ANSWER_S = 2.0
_PAUSE_S = 2.0
_LOOKED_AT_S = 10.0
"""How long after its last look somebody counts as looking."""
_GIVEN_UP_S = 60.0
"""After this time without a tier the process ends: the next one may find another Ray cluster."""
_NAMESPACES_MAX = 4
_HOTTEST = 10
_REQUESTS = 10


class Lines:
    """The answers, as lines for the page's process; threads may share it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, part: str, **told: Any) -> None:
        """Write one line about a part of the page."""
        line = json.dumps({"part": part, **told}, default=str)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


class Looks:
    """The time of the last look at the page."""

    def __init__(self) -> None:
        self._at = 0.0

    def follow(self, stream: Iterable[str]) -> None:
        """Note each line, and end this process with the page's."""
        for _ in stream:
            self._at = time.monotonic()
        os._exit(0)

    @property
    def is_looked_at(self) -> bool:
        """Whether somebody looks."""
        return time.monotonic() - self._at < _LOOKED_AT_S


class Asker:
    """The questions to one tier."""

    def __init__(self, client: Client, config: KVRayConfig, lines: Lines) -> None:
        self._client = client
        self._config = config
        self._lines = lines
        self._is_admitted = False

    def watch(self, looks: Looks) -> None:
        """Ask for the status until nothing has come for long, and for the rest when it is seen."""
        for part, ask in ((CONTENTS, self._contents), (REQUESTS, self._requests)):
            arguments = (part, ask, looks)
            threading.Thread(target=self._ask_on, args=arguments, daemon=True).start()
        heard_at = time.monotonic()
        while time.monotonic() - heard_at < _GIVEN_UP_S:
            if self._ask_once(STATUS, self._status):
                heard_at = time.monotonic()
            time.sleep(EVERY_S[STATUS])

    def _ask_on(self, part: str, ask: Callable[[], Any], looks: Looks) -> None:
        due = 0.0
        while True:
            time.sleep(0.2)
            if self._is_admitted and looks.is_looked_at and time.monotonic() >= due:
                self._ask_once(part, ask)
                due = time.monotonic() + EVERY_S[part]

    def _ask_once(self, part: str, ask: Callable[[], Any]) -> bool:
        try:
            self._lines.write(part, answer=ask())
            return True
        except KVRayError as error:
            self._lines.write(part, trouble=_in_line(error))
            return False

    def _status(self) -> dict[str, Any]:
        """Return the status of a tier that has no token, or ours."""
        if not self._is_admitted:
            with tier_named(self._config.cluster_name):
                ask_to_be_admitted(self._config, timeout_s=_ANSWER_S)
            self._is_admitted = True
        try:
            return self._client.status()
        except KVRayError:
            self._is_admitted = False  # the next tier of that name may have another token
            raise

    def _contents(self) -> dict[str, Any]:
        """Return what `kvray ls` reads, and the prefixes of the largest namespaces."""
        sizes: dict[str, int] = {}
        contents = self._client.contents()
        for answer in contents.values():
            for name, one in answer["namespaces"].items():
                sizes[name] = sizes.get(name, 0) + one.get("host_bytes", 0)
        largest = sorted(filter(None, sizes), key=lambda name: -sizes[name])[:_NAMESPACES_MAX]
        prefixes = {name: self._client.contents(name, hottest=_HOTTEST) for name in largest}
        return {"contents": contents, "prefixes": prefixes}

    def _requests(self) -> dict[str, Any]:
        try:
            return self._client.explain(last=_REQUESTS)
        except ConfigError as error:  # none is known
            return {"requests": [], "silent": [], "says": _in_line(error)}


def main() -> None:
    """Ask the tier of a configuration, given as its file and Ray's address; "" is the default."""
    path, address = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what Ray prints is no answer
        lines, looks = Lines(output), Looks()
        threading.Thread(target=looks.follow, args=(sys.stdin,), daemon=True).start()
        overrides = {"ray.address": address or None, "ray.timeout_s": _ANSWER_S}
        try:
            config = load_config(Path(path) if path else None, overrides=overrides)
            Asker(_connected(config, lines), config, lines).watch(looks)
        except ConfigError as error:
            lines.write(STATUS, trouble=_in_line(error))
            time.sleep(_PAUSE_S)
    os._exit(0)  # whatever Ray's threads wait for


def _connected(config: KVRayConfig, lines: Lines) -> Client:
    """Return a client, once there is a Ray cluster."""
    while True:
        try:
            return Client(config)
        except KVRayError as error:
            lines.write(STATUS, trouble=_in_line(error))
            time.sleep(_PAUSE_S)


def _in_line(error: KVRayError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
