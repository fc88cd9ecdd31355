"""The code of kvray that lies on this machine now, which a process made earlier may not have.

Run as `python -m kvray.actors.installed` it says so as JSON, from an interpreter that has loaded
nothing before. Imports neither Ray nor PyTorch.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import kvray
from kvray.store.layout import FORMAT_VERSION


def installed_code() -> dict[str, Any]:
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


if __name__ == "__main__":
    print(json.dumps(installed_code()))
