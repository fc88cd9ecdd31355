"""What engines ask of their node's shard."""

from collections.abc import Callable, Sequence
from typing import Any

from kvray.actors.opening_desk import OpeningDesk
from kvray.actors.replicas import Replicas
from kvray.block import Namespace

Handler = Callable[..., dict[str, Any]]


class EngineRequests:
    """Answers the requests of engines; fields come as the wire has them, with the connection."""

    def __init__(
        self, replicas: Replicas, desk: OpeningDesk, identity: Callable[[], dict[str, Any]]
    ) -> None:
        """Answer for a shard.

        Args:
            replicas: of the shard's node.
            desk: takes what they note of their prompts' openings.
            identity: returns what `hello` answers; raises while the shard does not serve.
        """
        self._replicas = replicas
        self._desk = desk
        self._identity = identity

    def handlers(self) -> dict[str, Handler]:
        """Return the function for each request."""
        return {"hello": self._hello, "register": self._register, "report": self._report}

    def _hello(self, connection: int) -> dict[str, Any]:
        return self._identity()

    def _register(
        self, connection: int, replica: str, rank: int, namespace: dict[str, Any]
    ) -> dict[str, Any]:
        self._replicas.register(connection, replica, rank, Namespace.from_wire(namespace))
        return {}

    def _report(
        self,
        connection: int,
        replica: str,
        rank: int,
        counters: dict[str, int],
        openings: Sequence[Any] = (),
        leaving: bool = False,
    ) -> dict[str, Any]:
        origin = self._replicas.report(connection, replica, rank, counters, leaving=leaving)
        if origin is None:
            return {"known": False}
        self._desk.note(origin, openings)
        return {"known": True, "incompatible": self._desk.answers(replica, rank)}
