"""An engine of a test, in a process of its own: it evaluates expressions about its node."""

import sys
from pathlib import Path

from kvray.identity.block import Namespace
from kvray.node import Registration, attach
from tests.far import Far
from tests.unit.store.small_arena import chain, fetch, store
from tests.waiting import HANG_S

NAMESPACE = Namespace(
    model="key:test@1",
    quantization="none",
    overrides="",
    kv_dtype="float32",
    num_layers=1,
    kv_factor=2,
    tokens_per_block=32,
    part_bytes=4096,
    num_parts=1,
    tp_layout="tp1",
    layer_groups="",
    attention_backend="test",
    engine="test 1.0",
)


class Engine:
    """A process that is attached to the tier, as an engine is: it must never import ray."""

    def __init__(self, directory: Path) -> None:
        self._far = Far("tests.kit.ray.engine:Attached", directory)

    def say(self, line: str) -> str:
        """Have `line` evaluated; return the answer's repr."""
        return str(self._far.call("say", line, timeout_s=HANG_S))

    def close(self) -> None:
        """Detach, and end the process. Twice is fine."""
        if self._far.process.poll() is None:
            self.say("link.detach()")
            self._far.kill()


class Attached:
    """The far end."""

    def __init__(self, directory: Path) -> None:
        link = attach(directory, label="engine", lock_wait_s=0.5, attach_retry_s=0.1)
        registration = Registration(
            replica="one", rank=0, namespace=NAMESPACE, counters=lambda: {"hits": 1}
        )
        named = {"link": link, "registration": registration, "sys": sys}
        self._scope = {**named, "chain": chain, "fetch": fetch, "store": store}

    def say(self, line: str) -> str:
        try:
            return repr(eval(line, self._scope))
        except Exception as error:  # noqa: BLE001 - the test wants to see it
            return repr(error)
