"""The application: engines that share their KV blocks through kvray, behind one OpenAI endpoint.

serve run examples/ray_serve/serve.yaml
"""

from typing import Any

from ray.serve import Application

from examples.ray_serve.engine import Engine
from examples.ray_serve.ingress import Ingress
from examples.ray_serve.settings import Settings


def build(args: dict[str, Any]) -> Application:
    """Return the application for the `args` of serve.yaml.

    Each engine is a deployment of its own: kvray brings a prompt to a replica by its name before
    the engine sees the request, and Serve says which replica of a deployment it takes only after.
    """
    settings = Settings.model_validate(args)
    engines = [
        Engine.options(
            name=name,
            max_ongoing_requests=settings.requests_max,
            max_queued_requests=settings.queued_max,
            ray_actor_options={"num_cpus": 0, "num_gpus": settings.num_gpus},
        ).bind(name, settings)
        for name in settings.engine_names()
    ]
    return Ingress.bind(settings, *engines)
