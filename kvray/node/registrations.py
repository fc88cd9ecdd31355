"""The ranks of this process, as its node's shard knows them."""

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvray.errors import KVRayError, LayoutMismatch, ShardUnavailable
from kvray.identity.block import Namespace
from kvray.node.engine_log import EngineLog
from kvray.node.stage_calls import ShardSocket
from kvray.store import Membership, PartRequest

_log = logging.getLogger("kvray.node")

_CALL_TIMEOUT_S = 2.0
_DESCRIBE_FRAMES = 64


@dataclass(slots=True, kw_only=True)
class Registration:
    """One rank of one replica, as its shard knows it."""

    replica: str
    rank: int
    namespace: Namespace
    counters: Callable[[], dict[str, int]]
    """Figures for `kvray status`: totals since the engine started."""
    log: EngineLog = field(default_factory=EngineLog)
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
    has_peers: bool = False
    """Whether the shard may bring blocks here, from other nodes or from disk."""
    stored: frozenset[int] = frozenset()
    """Namespaces, as arenas number them, of which the shard knows blocks on whichever node."""
    former: str | None = None
    """The last name that the shard heard, if the replica has another now."""
    instance: str = field(default_factory=lambda: secrets.token_hex(4))
    """Tells it from others of the same name, also when it registers again."""

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

    def renew(self, namespace: Namespace) -> None:
        """Tell the shard of another namespace with the next report."""
        self.namespace = namespace

    def heed(self, reply: dict[str, object]) -> None:
        """Take what the shard says of itself."""
        self.has_peers = reply.get("peers") is True
        order = reply.get("weights")
        if self.name_weights is not None and isinstance(order, list):
            self.weights_order, version = order
            self.name_weights(version)
        stored = reply.get("stored")
        self.stored = frozenset(stored) if isinstance(stored, list) else frozenset()

    @property
    def accepted(self) -> bool:
        """Whether the shard knows the rank by its present namespace."""
        return self.told == self.namespace


class Registrations:
    """The ranks that the shard must know; each new shard is told again. Thread-safe."""

    def __init__(
        self, socket: ShardSocket, membership: Callable[[], tuple[str, Membership] | None]
    ) -> None:
        """Report to the shard behind `socket`; `membership` gives this process's arena and row."""
        self._socket = socket
        self._membership = membership
        self._lock = threading.Lock()
        self._all: list[Registration] = []

    def add(self, registration: Registration, *, tell: bool) -> None:
        """Add a rank; `tell` the shard now, else the next `report` does.

        Raises:
            LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        with self._lock:
            self._all.append(registration)
        if not tell:
            return
        try:
            self._register(registration, _CALL_TIMEOUT_S)
        except LayoutMismatch:
            self.remove(registration)
            raise
        except KVRayError as error:
            _log.warning(
                "kvray: replica %s has not registered yet: %s", registration.replica, error
            )

    def remove(self, registration: Registration) -> bool:
        """Forget a rank; False if it is not known."""
        with self._lock:
            left = [one for one in self._all if one is not registration]
            was_in = len(left) < len(self._all)
            self._all = left
        return was_in

    def forget_answers(self) -> None:
        """Tell everything again, to a new shard or connection."""
        with self._lock:
            for registration in self._all:
                registration.told = None

    def report(self) -> None:
        """Tell the shard of every rank, changed or not: a restarted shard knows none."""
        for registration in list(self._all):
            if not any(one is registration for one in self._all):
                continue  # It left since the list was taken.
            try:
                self.report_one(registration, timeout_s=_CALL_TIMEOUT_S)
            except ShardUnavailable as error:
                self.forget_answers()
                _log.debug("kvray: no report: %s", error)
                return
            except KVRayError as error:
                if registration.refusal != str(error):
                    registration.refusal = str(error)
                    _log.error("kvray: replica %s is refused: %s", registration.replica, error)

    def leave(self, registration: Registration, *, timeout_s: float) -> None:
        """Send a rank's last figures, or say that they are lost; a shard that is away costs once.

        A rank that the shard refused has no figures there.
        """
        reason: object = "the shard did not answer lately"
        if registration.told is not None:
            try:
                self.report_one(registration, timeout_s=timeout_s, leaving=True)
                return
            except KVRayError as error:
                reason = error
                self.forget_answers()
        if registration.refusal is None:
            _log.warning(
                "kvray: the last figures of replica %s rank %d are lost: %s",
                registration.replica,
                registration.rank,
                reason,
            )

    def leave_all(self, *, timeout_s: float) -> None:
        """Send or give up the last figures of all ranks that are left."""
        for registration in list(self._all):
            self.leave(registration, timeout_s=timeout_s)

    def report_one(
        self, registration: Registration, *, timeout_s: float, leaving: bool = False
    ) -> None:
        """Tell the shard of a rank, `leaving` with its last figures; KVRayError: it refused."""
        if registration.former is not None:
            self._leave(registration, registration.former, timeout_s)
        if not registration.accepted:
            self._register(registration, timeout_s)
        namespace, weights_order = registration.namespace, registration.weights_order
        log = registration.log
        try:
            reply = self._socket.call(
                "report",
                timeout_s=timeout_s,
                replica=registration.replica,
                rank=registration.rank,
                counters=registration.counters(),
                weights_order=registration.weights_order,
                leaving=leaving,
                **log.drain(),
            )
        except ShardUnavailable:
            log.give_back()
            raise
        known = bool(reply.get("known"))
        if not known:
            log.give_back()
        registration.told = namespace if known and not leaving else None
        registration.heed(reply)
        log.prompts.hear(reply.get("sample"))
        if known and not leaving:
            log.block_tokens.hear(reply.get("describe"))
            self._describe(registration)
        if registration.weights_order != weights_order:  # somebody waits to hear of it
            self.report_one(registration, timeout_s=timeout_s)

    def _describe(self, registration: Registration) -> None:
        """Tell the shard the tokens of blocks, in so many frames that others have their turn."""
        block_tokens = registration.log.block_tokens
        tokens_per_block = registration.namespace.tokens_per_block
        for _ in range(_DESCRIBE_FRAMES):
            chains = block_tokens.take(tokens_per_block)
            if not chains:
                return
            try:
                reply = self._socket.call(
                    "describe",
                    timeout_s=_CALL_TIMEOUT_S,
                    replica=registration.replica,
                    rank=registration.rank,
                    chains=chains,
                )
            except KVRayError:
                block_tokens.forget()
                raise
            block_tokens.hear(reply.get("describe"))

    def _leave(self, registration: Registration, former: str, timeout_s: float) -> None:
        """Have the shard forget a rank's former name; its figures go on under the new one."""
        registration.told = None
        self._socket.call(
            "report",
            timeout_s=timeout_s,
            replica=former,
            rank=registration.rank,
            counters={},
            leaving=True,
        )
        registration.former = None

    def _register(self, registration: Registration, timeout_s: float) -> None:
        membership, namespace = self._membership(), registration.namespace
        name = registration.replica
        reply = self._socket.call(
            "register",
            timeout_s=timeout_s,
            replica=name,
            instance=registration.instance,
            rank=registration.rank,
            namespace=namespace.to_wire(),
            wanted=[
                list(one if one.block_bytes else one[:2]) for one in registration.part_requests
            ],
            num_ranks=registration.num_ranks,
            engine_ranks=registration.engine_ranks,
            holder=None if membership is None else [membership[0], *membership[1]],
            adapters=registration.adapters,
            tenants=registration.tenants,
        )
        # Otherwise the shard knows a holder of an arena that this process has left meanwhile.
        registration.told = namespace if membership == self._membership() else None
        registration.heed(reply)
        registration.take_name(name, reply.get("replica"))
        registration.refusal = None
