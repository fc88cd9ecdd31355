"""A request router for Ray Serve that knows what the tier holds.

A deployment names it in its `request_router_config`. A request whose token ids it sees goes to the
replica with the earliest predicted first token; any other, and every request while the tier does
not answer, to the shorter queue of two replicas.

By a `Routed` an ingress tells the router what becomes of a request.
"""

import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvray.actors.ray_glue.calls import ActorCalls
from kvray.actors.routers.exchange import SharedLoads
from kvray.actors.routers.pools import Pools
from kvray.actors.routers.surveys import Surveys
from kvray.actors.telemetry.figures import Figures, Totals
from kvray.actors.telemetry.metrics_export import MetricsThread
from kvray.config import load_config
from kvray.errors import ConfigError
from kvray.identity.keys import pack_tokens
from kvray.routing import PREFILL_STAT, SLOWDOWN_STAT, Decisions, Outcomes, Place, PoolMatch, Survey
from kvray.serve.routed import Routed

_log = logging.getLogger("ray.serve")


class KvRayRouter(RequestRouter):
    """Ranks replicas by the predicted time to a request's first token.

    A replica's name in kvray hangs on its Serve replica id, see `replica_prefix`. The prompt is the
    argument `kvray_tokens` of the call, else its first positional one, if that is a list or an
    array of token ids; `kvray_salt` and `kvray_lora` are as for `Client.prefetch`. An ingress that
    passes a `Routed` as `kvray_routed` to `choose_replica` tells it how choices turn out.
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
        cluster_name = load_config(kvray_config).cluster_name
        outcomes, ask = Outcomes(), ActorCalls()
        self._surveys = Surveys(ask, cluster_name, timeout_s=timeout_s, outcomes=outcomes)
        deployment = self._deployment_id
        self._loads = SharedLoads(
            f"{deployment.app_name}-{deployment.name}",
            cluster_name,
            outcomes.take_first_tokens,
            pool_blocks=pool_blocks,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        self._decisions = Decisions(self._loads, outcomes)
        self._pools = Pools()
        # Both end with the process, as Serve does not say when a router ends.
        MetricsThread(lambda _: figures_of(outcomes.totals() | self._pools.totals()), cluster_name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Know these replicas, and no others."""
        super().update_replicas(replicas)
        self._loads.own.retain(map(self._name, replicas))
        self._pools.follow({self._name(one): one.routing_stats for one in replicas})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return all replicas, each in a rank of its own; two random ones without a prompt."""
        self._loads.start()
        if pending_request is None or not candidate_replicas:
            return _two(candidate_replicas)
        pending_request.routing_context.should_backoff = True  # else a full fleet is asked on end
        request = pending_request.metadata.internal_request_id
        order = self._decisions.order(request)
        if order is None:
            try:
                await self._decide(request, candidate_replicas, pending_request)
            except Exception:  # noqa: BLE001 - Serve's task would end, and the request wait on end
                _log.exception("A request goes to the shorter queue, after a defect")
                self._decisions.begin(request, None, None, now=time.monotonic(), is_told=False)
            order = self._decisions.order(request) or []
        by_name = {self._name(one): one for one in candidate_replicas}
        return [[by_name[name]] for name in order if name in by_name] or _two(candidate_replicas)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note which replica has taken a request that nobody chose one for beforehand."""
        request = pending_request.metadata.internal_request_id
        self._decisions.sent(request, self._prefix + replica_id.unique_id, now=time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended."""
        self._decisions.over(internal_request_id, now=time.monotonic())

    async def _decide(
        self, request: str, replicas: Sequence[RunningReplica], pending: PendingRequest
    ) -> None:
        """Decide on the order of the replicas for a request, or that nothing is known of it."""
        tokens, marks = _prompt_of(pending.args, pending.kwargs)
        with suppress(ConfigError):  # as whoever reads them finds
            tokens = tokens if tokens is None else pack_tokens(tokens)  # they are read twice
        told = pending.kwargs.get("kvray_routed")
        is_told, near = isinstance(told, Routed) and told.is_told, list[str]()
        survey = choice = None
        if tokens is not None:
            survey = await self._surveys.survey(tokens, [*map(self._name, replicas)], **marks)
        if survey is not None:
            near = self._here(replicas, survey)
            pools = self._pools.match(tokens, **marks)
            here = [one for one in replicas if one.replica_id in self.curr_replicas]
            places = [self._place(self._name(one), one.routing_stats, pools) for one in here]
            if places:  # else they ended while the shard was asked
                choice = await self._loads.choose(
                    request, places, len(tokens), survey, is_told=is_told
                )
        self._decisions.begin(request, choice, survey, now=time.monotonic(), is_told=is_told)
        if isinstance(told, Routed):
            told.follow(self._decisions, request, near, choice)

    def _here(self, replicas: Sequence[RunningReplica], survey: Survey) -> list[str]:
        """Return the replicas whose nodes have in memory what there is of a prompt."""
        homes = {name: self._surveys.home(name) for name in map(self._name, replicas)}
        near = {node: survey.is_in_memory_of(node) for node in {*homes.values()} if node}
        return [name for name, node in homes.items() if near.get(node, False)]

    def _place(self, name: str, stats: Mapping[str, Any], pools: Mapping[str, PoolMatch]) -> Place:
        profile = self._surveys.profile(name)
        return Place(
            replica=name,
            node=self._surveys.home(name),
            prefill_tokens_per_s=float(stats.get(PREFILL_STAT, 0.0)),
            decode_slowdown=float(stats.get(SLOWDOWN_STAT, 0.0)),
            disk=None if profile is None else profile.disk,
            links={} if profile is None else profile.links,
            pool=pools.get(name),
        )

    def _name(self, replica: RunningReplica) -> str:
        return f"{self._prefix}{replica.replica_id.unique_id}"


def _two(replicas: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
    """Return two random replicas: Serve takes the one with the shorter queue."""
    return [random.sample(list(replicas), min(2, len(replicas)))]


def _prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a call's token ids, None if there are none, and what else its keys hang on."""
    tokens = kwargs.get("kvray_tokens", args[0] if args else None)
    is_tokens = isinstance(tokens, np.ndarray) or (
        isinstance(tokens, list) and all(type(one) is int for one in tokens[:1])
    )
    if not is_tokens or not len(tokens):
        return None, {}
    return tokens, {"salt": kwargs.get("kvray_salt"), "lora": kwargs.get("kvray_lora")}


def figures_of(totals: dict[tuple[str, tuple[str, ...]], float]) -> Figures:
    """Return a router's counts as the export takes them."""
    return Figures(totals=[Totals(source="router", totals=totals)])
