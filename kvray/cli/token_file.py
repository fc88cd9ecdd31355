"""Token ids of a prompt, from a file."""

import json
import sys
from pathlib import Path

from kvray.errors import ConfigError


def read_tokens(path: Path) -> list[int]:
    """Return the token ids in a file: one JSON list, or numbers between white space; - is stdin."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        found = json.loads(text) if "[" in text else [int(one) for one in text.split()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as token ids ({error}).") from None
    if not isinstance(found, list) or not found or any(type(token) is not int for token in found):
        raise ConfigError(
            f"{path} must have token ids: one JSON list such as [1, 15043], or numbers between"
            " white space."
        )
    return found
