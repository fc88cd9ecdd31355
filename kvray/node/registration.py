"""One rank of this process, as its node's shard knows it, and what it says to the shard."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvray.errors import KVRayError, ShardUnavailable
from kvray.identity.block import Namespace
from kvray.node.engine_log import EngineLog
from kvray.node.stage_calls import ShardSocket
from kvray.store import Membership, PartRequest

_log = logging.getLogger("kvray.node")

CALL_TIMEOUT_S = 2.0
_DESCRIBE_FRAMES = 64

Places = Callable[[], tuple[str, Membership] | None]
"""Gives this process's arena and its row there; None: it has none now."""


@dataclass(slots=True, kw_only=True, eq=False)
class Registration:
    """One rank of one replica, as its shard knows it."""

    replica: str
    rank: int
    namespace: Namespace
    """The shard is told of another one with the next report."""
    counters: Callable[[], dict[str, int]]
    """Figures for `kvray status`: totals since the engine started."""
    log: EngineLog = field(default_factory=EngineLog)
    served: str = ""
    """What its engine's model is called, for people."""
    part_requests: tuple[PartRequest, ...] = (PartRequest(0),)
    """The parts that its leases must have."""
    num_ranks: int = 1
    """Ranks of its group, one of which speaks for all; 1: itself alone."""
    engine_ranks: int = 1
    """Ranks of its engine, all of which must know its weights; 1: nobody counts them."""
    adapters: str | None = None
    """How its engine reads LoRA adapters; None: it has none."""
    tenants: str | None = None
    """`TenantSalts.check` of the secret that derives its salts; None: no secret."""
    name_weights: Callable[[str | None], None] | None = None
    """Takes the version of the engine's weights, and renews the namespace; None: it never changes.
    Called by the thread that reports."""
    weights_order: str = ""
    """The last order to name a version that it has carried out."""
    told: Namespace | None = None
    """The namespace that the shard accepted; None: it must hear of the rank again."""
    refusal: str | None = None
    """The shard's sentence, if it refuses."""
    has_peers: bool | None = False
    """Whether the shard may bring blocks here, from other nodes or from disk; None: the lookup is
    away."""
    stored: frozenset[int] = frozenset()
    """Namespaces, as arenas number them, of which the shard knows blocks on whichever node."""
    former: str | None = None
    """The last name that the shard heard, if the replica has another now."""
    instance: str = field(default_factory=lambda: secrets.token_hex(4))
    """Tells it from others of the same name, also when it registers again."""

    @property
    def accepted(self) -> bool:
        """Whether the shard knows the rank by its present namespace."""
        return self.told == self.namespace

    def rename(self, replica: str) -> None:
        """Have it registered as a rank of `replica`, with the next report."""
        if replica != self.replica:
            former = self.former or self.replica
            # In this order: the thread that reports must not confuse the two names.
            self.replica = replica
            self.former = former

    def take_name(self, asked: str, given: object) -> None:
        """Go by the name that the shard has `given` it instead of the one that it `asked` for.

        The engine's thread may have renamed it meanwhile: then it registers once more.
        """
        if isinstance(given, str) and given != asked:
            _log.warning(
                "kvray: another living engine on this node is replica %s; this one goes by %s. Give"
                " each engine a connector.replica of its own, or none.",
                asked,
                given,
            )
            if self.replica == asked:
                self.replica = given
            else:
                self.former = given

    def register(self, socket: ShardSocket, places: Places, *, timeout_s: float) -> None:
        """Tell the shard what the rank is and reads.

        KVRayError: it refuses; as LayoutMismatch, if another replica claims the same `model_key`
        with another layout.
        """
        place, namespace, name = places(), self.namespace, self.replica
        reply = socket.call(
            "register",
            timeout_s=timeout_s,
            replica=name,
            instance=self.instance,
            rank=self.rank,
            namespace=namespace.to_wire(),
            wanted=[list(one if one.block_bytes else one[:2]) for one in self.part_requests],
            num_ranks=self.num_ranks,
            engine_ranks=self.engine_ranks,
            holder=None if place is None else [place[0], *place[1]],
            adapters=self.adapters,
            tenants=self.tenants,
            served=self.served,
        )
        # Otherwise the shard knows a holder of an arena that this process has left meanwhile.
        self.told = namespace if place == places() else None
        self._heed(reply)
        self.take_name(name, reply.get("replica"))
        self.refusal = None

    def report(
        self, socket: ShardSocket, places: Places, *, timeout_s: float, leaving: bool = False
    ) -> None:
        """Send the rank's figures and log, `leaving` the last ones; registers it if need be.

        KVRayError: the shard refused.
        """
        if self.former is not None:
            # The shard forgets the former name; the figures go on under the new one.
            self.told = None
            self._send(socket, self.former, {}, timeout_s=timeout_s, leaving=True)
            self.former = None
        if not self.accepted:
            self.register(socket, places, timeout_s=timeout_s)
        namespace, order = self.namespace, self.weights_order
        try:
            reply = self._send(
                socket,
                self.replica,
                self.counters(),
                timeout_s=timeout_s,
                leaving=leaving,
                weights_order=order,
                **self.log.drain(),
            )
        except ShardUnavailable:
            self.log.give_back()
            raise
        is_known = bool(reply.get("known"))
        if not is_known:
            self.log.give_back()
        self.told = namespace if is_known and not leaving else None
        self._heed(reply)
        self.log.hear(reply)
        if self.accepted:
            self._describe(socket)
        if self.weights_order != order:  # somebody waits to hear of it
            self.report(socket, places, timeout_s=timeout_s)

    def _send(
        self, socket: ShardSocket, replica: str, counters: dict[str, int], **fields: Any
    ) -> dict[str, Any]:
        return socket.call("report", replica=replica, rank=self.rank, counters=counters, **fields)

    def _heed(self, reply: dict[str, Any]) -> None:
        """Take what the shard says of itself."""
        peers = reply.get("peers", False)
        self.has_peers = peers if peers is None else peers is True
        order = reply.get("weights")
        if self.name_weights is not None and isinstance(order, list):
            self.weights_order, version = order
            self.name_weights(version)
        stored = reply.get("stored")
        self.stored = frozenset(stored) if isinstance(stored, list) else frozenset()

    def _describe(self, socket: ShardSocket) -> None:
        """Tell the shard the tokens of blocks, in so many frames that others have their turn."""
        for _ in range(_DESCRIBE_FRAMES):
            chains = self.log.block_tokens.take(self.namespace.tokens_per_block)
            if not chains:
                return
            try:
                reply = socket.call(
                    "describe",
                    timeout_s=CALL_TIMEOUT_S,
                    replica=self.replica,
                    rank=self.rank,
                    chains=chains,
                )
            except KVRayError:
                self.log.block_tokens.forget()
                raise
            self.log.hear(reply)
