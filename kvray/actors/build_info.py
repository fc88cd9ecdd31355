"""The code and settings of a part of the tier, and the code that is installed on this node.

`python -m kvray.actors.build_info` prints the installed code as JSON. A new interpreter has to run
it, because an older process still has the old modules. It imports neither Ray nor PyTorch.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import kvray
from kvray.config import KVRayConfig
from kvray.store.arena.layout import FORMAT_VERSION

BuildInfo = dict[str, Any]
"""Plain values, which another version of kvray can read: "version", "code" and "arena_format"; of
a running part "settings" and "node_id" too, and of a shard its "state"."""


def installed_code() -> BuildInfo:
    """Return "version", "code" (a digest of all modules) and "arena_format" of this package."""
    package = Path(kvray.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode())
        digest.update(content)
    return {
        "version": kvray.__version__,
        "code": digest.hexdigest(),
        "arena_format": FORMAT_VERSION,
    }


def build_info_of(settings: dict[str, Any], node_id: str) -> BuildInfo:
    """Return the build info of an actor that has just loaded its code.

    `settings` are those of `settings_of`; `node_id` is Ray's id of its node.
    """
    return {"settings": settings, "node_id": node_id, **installed_code()}


def settings_of(config: KVRayConfig) -> dict[str, Any]:
    """Return the configuration as dotted key -> plain value."""
    values = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        if isinstance(getattr(config, name), BaseModel):
            found |= {f"{name}.{key}": value for key, value in values[name].items()}
        else:
            found[name] = values[name]
    return found


if __name__ == "__main__":
    print(json.dumps(installed_code()))
