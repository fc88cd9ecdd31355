"""What a part of the tier was made with, which it tells whoever may have to make it anew."""

from collections.abc import Mapping
from typing import Any

import ray

from kvray.actors.installed import installed_code


def vintage(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return "settings", where this actor is, and the code that it has just loaded.

    Args:
        settings: dotted key -> plain value, those that the actor was made with.
    """
    node_id = ray.get_runtime_context().get_node_id()
    return {"settings": dict(settings), "node_id": node_id, **installed_code()}
