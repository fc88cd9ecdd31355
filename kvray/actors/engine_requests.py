"""What engines ask of their node's shard."""

from collections.abc import Callable
from typing import Any

from kvray.actors.replicas import Replicas
from kvray.block import Namespace

Handler = Callable[..., dict[str, Any]]


class EngineRequests:
    """Answers the requests of engines; fields come as the wire has them, with the connection."""

    def __init__(self, replicas: Replicas, identity: Callable[[], dict[str, Any]]) -> None:
        """Answer for a shard.

        Args:
            replicas: of the shard's node.
            identity: returns what `hello` answers; raises while the shard does not serve.
        """
        self._replicas = replicas
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
        leaving: bool = False,
    ) -> dict[str, Any]:
        known = self._replicas.report(connection, replica, rank, counters, leaving=leaving)
        return {"known": known}
