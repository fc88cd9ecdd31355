"""A request router for Ray Serve that knows what the tier holds.

A deployment names it in its `request_router_config`. A request whose token ids it sees goes to the
replica with the earliest predicted first token; any other, and every request while the tier does
not answer, to the shorter queue of two replicas.
"""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvray.config import load_config
from kvray.routing import Choice
from kvray.serve.prefill_speed import PREFILL_STAT
from kvray.serve.standings import Place, Standings
from kvray.serve.surveys import Surveys

_log = logging.getLogger("ray.serve")

_ORDERS_MAX = 4096
"""Of a request that was given up while it waited Serve does not tell; the oldest go."""
_ARGUMENTS = ("kvray_tokens", "kvray_salt", "kvray_lora")


class KvRayRouter(RequestRouter):
    """Ranks replicas by the predicted time to a request's first token.

    A replica's name in kvray hangs on its Serve replica id, see `replica_prefix`. The prompt is the
    argument `kvray_tokens` of the call, else its first positional one, if that is a list or an
    array of token ids; `kvray_salt` and `kvray_lora` are as for `Client.prefetch`.
    """

    def initialize_state(
        self,
        *,
        kvray_config: str | None = None,
        timeout_s: float = 0.02,
        pool_blocks: int = 4096,
        prefill_tokens_per_s: float = 5_000.0,
        replica_prefix: str = "",
        **unknown: Any,
    ) -> None:
        """Take the router's own arguments, `request_router_kwargs`.

        Args:
            kvray_config: kvray.yaml; None: what `load_config` finds.
            timeout_s: how long a request may wait for the tier; it is asked nothing for a while
                after it did not answer in time.
            pool_blocks: blocks of an engine's own pool.
            prefill_tokens_per_s: speed of a replica that has not told its own.
            replica_prefix: what a replica's name in kvray has before the unique part of its Serve
                replica id.
            **unknown: other names, which the log tells.
        """
        if unknown:
            _log.warning(
                "KvRayRouter has no argument %s; correct request_router_kwargs.",
                " and no ".join(sorted(unknown)),
            )
        self._prefix = replica_prefix
        self._surveys = Surveys(load_config(kvray_config).cluster_name, timeout_s=timeout_s)
        self._standings = Standings(
            pool_blocks=pool_blocks, prefill_tokens_per_s=prefill_tokens_per_s
        )
        # Request -> the replicas for it, the best first: Serve asks again while the first are full.
        self._orders: OrderedDict[str, list[str]] = OrderedDict()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Know these replicas, and no others."""
        super().update_replicas(replicas)
        self._standings.retain(map(self._name, replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return all replicas, each in a rank of its own; two random ones without a prompt."""
        if pending_request is None or len(candidate_replicas) < 2:
            return _two(candidate_replicas)
        pending_request.routing_context.should_backoff = True  # else a full fleet is asked on end
        request = pending_request.metadata.internal_request_id
        by_name = {self._name(one): one for one in candidate_replicas}
        if request not in self._orders:
            choice = await self._choose(request, list(by_name.values()), pending_request)
            if choice is None:
                return _two(candidate_replicas)
            self._orders[request] = [one.cost.replica for one in choice.ranked]
            if len(self._orders) > _ORDERS_MAX:
                self._orders.popitem(last=False)
        order = self._orders[request]
        return [[by_name[name]] for name in order if name in by_name] or _two(candidate_replicas)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended."""
        self._standings.done(internal_request_id, time.monotonic())
        self._orders.pop(internal_request_id, None)

    async def _choose(
        self, request: str, replicas: Sequence[RunningReplica], pending: PendingRequest
    ) -> Choice | None:
        """Return the choice for a request, and note it; None if nothing is known of its prompt."""
        tokens, marks = _prompt_of(pending.args, pending.kwargs)
        if tokens is None:
            return None
        names = [*map(self._name, replicas)]
        survey = await self._surveys.survey(tokens, names, **marks)
        if survey is None:
            return None
        now = time.monotonic()
        here = [one for one in replicas if one.replica_id in self.curr_replicas]
        if not here:
            return None
        choice = self._standings.choose(self._places(here), len(tokens), survey, now=now)
        self._standings.routed(request, choice, survey, now=now)
        return choice

    def _places(self, replicas: Sequence[RunningReplica]) -> list[Place]:
        return [
            Place(
                replica=self._name(one),
                node=self._surveys.home(self._name(one)),
                prefill_tokens_per_s=float(one.routing_stats.get(PREFILL_STAT, 0.0)),
            )
            for one in replicas
        ]

    def _name(self, replica: RunningReplica) -> str:
        return f"{self._prefix}{replica.replica_id.unique_id}"


def _two(replicas: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
    """Return two random replicas: Serve takes the one with the shorter queue."""
    return [random.sample(list(replicas), min(2, len(replicas)))]


def _prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a call's token ids, None if there are none, and what else its keys hang on."""
    tokens = kwargs.get(_ARGUMENTS[0], args[0] if args else None)
    is_tokens = isinstance(tokens, np.ndarray) or (
        isinstance(tokens, list) and all(type(one) is int for one in tokens[:1])
    )
    if not is_tokens or not len(tokens):
        return None, {}
    return tokens, {"salt": kwargs.get(_ARGUMENTS[1]), "lora": kwargs.get(_ARGUMENTS[2])}
