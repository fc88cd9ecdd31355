"""Names of the actors, and calls to them with a deadline and kvray's own errors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from kvray.errors import KVRayError, ShardUnavailable

NAMESPACE = "kvray"
LOOKUP_NAME = "kvray-lookup"
SUPERVISOR_NAME = "kvray-supervisor"


def shard_name(node_id: str) -> str:
    """Return the actor name of the shard on a Ray node."""
    return f"kvray-shard-{node_id[:12]}"


def get_actor(name: str) -> Any:
    """Return the handle of a named actor of the tier.

    Raises:
        ShardUnavailable: there is none of that name.
    """
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise ShardUnavailable(
            f"There is no actor {name} in this Ray cluster; start the tier with `kvray up`."
        ) from None


def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """Call an actor's method and wait for at most `timeout_s`.

    Raises:
        ShardUnavailable: no answer in time, or the actor is gone.
        KVRayError: what the method raised.
    """
    with mapped_errors():
        return ray.get(method.remote(*args), timeout=timeout_s)


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn Ray's exceptions into kvray's."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause if hasattr(error, "cause") else None
        if isinstance(cause, KVRayError):
            raise cause from None
        raise
    except GetTimeoutError:
        raise ShardUnavailable(
            "An actor of the tier did not answer in time; see `kvray status`."
        ) from None
    except (RayActorError, RayError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ShardUnavailable(f"An actor of the tier is gone ({first_line}).") from None
