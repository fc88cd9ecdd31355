"""The process that asks the tier for the page; it writes each answer as a line of JSON.

A process that is connected to Ray may hang, or be ended by Ray, when the cluster goes. The page's
own process must not. Each line that comes in says that somebody looks at the page.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from kvray.actors.owner.admin import ask_to_be_admitted
from kvray.actors.ray_glue.calls import tier_named
from kvray.cli.page.state import CONTENTS, EVERY_S, HOTTEST, REQUESTS, STATUS
from kvray.client import Client
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError

_ANSWER_S = 2.0
_POLL_S = 0.2
_LOOKED_AT_S = 10.0
"""How long after its last look somebody counts as looking."""
_GIVEN_UP_S = 60.0
"""After this time without a tier the process ends: the next one may find another Ray cluster."""
_NAMESPACES_MAX = 4
_REQUESTS, _FOUND = 10, 3


class Asker:
    """The questions to one tier, and the answers on their way to the page."""

    def __init__(self, path: Path | None, address: str | None, output: TextIO) -> None:
        """Write to `output` about the tier of a configuration file, in the Ray at `address`."""
        self._path = path
        self._overrides = {"ray.address": address, "ray.timeout_s": _ANSWER_S}
        self._output = output
        self._lock = threading.Lock()  # held to write a line
        self._looked_at = -_LOOKED_AT_S
        self._client: Client | None = None
        self._is_admitted = False
        self._wanted: int | None = None
        """The request that somebody has looked for last."""
        self._is_wanted = threading.Event()

    def follow(self) -> None:
        """Note each look at the page, and end this process with the page's."""
        for line in sys.stdin:
            self._looked_at = time.monotonic()
            wanted = int(line) if line.strip() else None
            if wanted not in (None, self._wanted):
                self._wanted = wanted
                self._is_wanted.set()
        os._exit(0)

    def run(self) -> None:
        """Ask for the status until none has come for long, and for the rest while it is seen."""
        for part, ask in ((CONTENTS, _contents), (REQUESTS, self._requests)):
            threading.Thread(target=self._ask_on, args=(part, ask), daemon=True).start()
        heard_at = time.monotonic()
        while time.monotonic() - heard_at < _GIVEN_UP_S:
            if self._attempt(STATUS, self._status) or self._client is None:
                heard_at = time.monotonic()
            time.sleep(EVERY_S[STATUS])

    def _attempt(self, part: str, ask: Callable[[], dict[str, Any]]) -> bool:
        """Write the answer to a question, or the reason for none; return whether one came."""
        try:
            told: dict[str, Any] = {"answer": ask()}
        except KVRayError as error:
            told = {"trouble": str(error)}
        line = json.dumps({"part": part, **told}, default=str)
        with self._lock:
            self._output.write(line + "\n")
            self._output.flush()
        return "answer" in told

    def _ask_on(self, part: str, ask: Callable[[Client], dict[str, Any]]) -> None:
        while True:
            client, is_seen = self._client, time.monotonic() - self._looked_at < _LOOKED_AT_S
            if client is not None and self._is_admitted and is_seen:
                self._attempt(part, partial(ask, client))
                if part == REQUESTS:
                    self._is_wanted.wait(EVERY_S[part])
                    self._is_wanted.clear()
                else:
                    time.sleep(EVERY_S[part])
            time.sleep(_POLL_S)

    def _status(self) -> dict[str, Any]:
        """Return the status of a tier that has no token, or ours."""
        config = load_config(self._path, overrides=self._overrides)
        self._client = self._client or Client(config)
        try:
            if not self._is_admitted:
                with tier_named(config.cluster_name):
                    ask_to_be_admitted(config, timeout_s=_ANSWER_S)
            found = self._client.status()
        except KVRayError:
            self._is_admitted = False  # the next tier of that name may have another token
            raise
        self._is_admitted = True
        return found

    def _requests(self, client: Client) -> dict[str, Any]:
        """Return the latest requests, and those of the number that is looked for."""
        told = _explained(client, None, _REQUESTS)
        if (wanted := self._wanted) is None:
            return told
        return {**told, "found": {**_explained(client, wanted, _FOUND), "id": str(wanted)}}


def main() -> None:
    """Ask the tier of a configuration, given as its file and Ray's address; "" is the default."""
    path, address = sys.argv[1:]
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    asker = Asker(Path(path) if path else None, address or None, output)
    threading.Thread(target=asker.follow, daemon=True).start()
    asker.run()
    os._exit(0)  # whatever Ray's threads wait for


def _contents(client: Client) -> dict[str, Any]:
    """Return what `kvray ls` reads, and the prefixes of the largest namespaces."""
    sizes: dict[str, int] = {}
    contents = client.contents()
    for answer in contents.values():
        for name, one in answer["namespaces"].items():
            sizes[name] = sizes.get(name, 0) + one.get("host_bytes", 0)
    largest = sorted(filter(None, sizes), key=lambda name: -sizes[name])[:_NAMESPACES_MAX]
    prefixes = {name: client.contents(name, hottest=HOTTEST) for name in largest}
    return {"contents": contents, "prefixes": prefixes}


def _explained(client: Client, number: int | None, last: int) -> dict[str, Any]:
    try:
        return {**client.explain(number, last=last), "says": ""}
    except ConfigError as error:  # none is known
        return {"requests": [], "silent": [], "says": str(error)}


if __name__ == "__main__":
    main()
