"""The application: engines that share their KV blocks through kvray, behind one OpenAI endpoint."""

from typing import TYPE_CHECKING, Any

from kvray.errors import needs
from kvray.serve.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application, Deployment

_INGRESS_REQUESTS_MAX = 4096
_STATS_PERIOD_S = 2.0
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
"""Serve replaces a replica that is silent so long three times in a row."""


def app(args: dict[str, Any]) -> "Application":
    """Return the application for the `args` of a serve.yaml, or of `serve run kvray.serve:app`.

    Args:
        args: the fields of `Settings`.

    Raises:
        ConfigError: a package that the extra `serve` brings is missing.
    """
    settings = Settings.model_validate(args)
    with needs("serve"):
        from ray import serve

        from kvray.serve.ingress import Ingress
    ingress: Deployment = serve.deployment(
        name="Ingress",
        max_ongoing_requests=_INGRESS_REQUESTS_MAX,
        max_queued_requests=_INGRESS_REQUESTS_MAX,
        # It leaves with its last answer, which has this deadline. Serve's 20 s would break it off.
        graceful_shutdown_timeout_s=settings.request_timeout_s,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress))
    return ingress.bind(settings, engines(settings))


def engines(settings: Settings) -> "Application":
    """Return the deployment of the engines, bound: an ingress of yours takes it as an argument.

    Raises:
        ConfigError: a package that the extra `serve` brings is missing.
    """
    with needs("serve"):
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        from kvray.serve.engine import REPLICA_PREFIX, Engine
    options: dict[str, Any] = {"num_replicas": settings.num_replicas}
    if settings.autoscaling_config is not None:
        options = {"autoscaling_config": settings.autoscaling_config}
    if settings.router == "kvray":
        config = settings.kvray_config
        router: dict[str, Any] = {  # its types say less than it takes
            "request_router_class": "kvray.serve.router:KvRayRouter",
            "request_router_kwargs": {
                "kvray_config": None if config is None else str(config),
                "pool_blocks": settings.pool_blocks,
                "replica_prefix": REPLICA_PREFIX,
            },
            "request_routing_stats_period_s": _STATS_PERIOD_S,
        }
        options["request_router_config"] = RequestRouterConfig(**router)
    deployment: Deployment = serve.deployment(
        name="Engine",
        max_ongoing_requests=settings.requests_max,
        max_queued_requests=-1,  # the ingress counts those that wait, and refuses too many
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        ray_actor_options={"num_cpus": 0, "num_gpus": settings.num_gpus},
        **options,
    )(Engine)
    return deployment.bind(settings)
