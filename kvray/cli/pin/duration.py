"""Durations as people write them on a command line."""

import re

from kvray.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DAYS_MAX = 366


def parse_duration(given: str) -> float:
    """Return a text such as `90s`, `30m`, `1h` or `7d` in seconds; ConfigError: it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", given.strip())
    if found is None:
        raise ConfigError(f"{given!r:.40} is no duration; write 90s, 30m, 1h or 7d.")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if not 1 <= seconds <= _DAYS_MAX * _SECONDS["d"]:
        raise ConfigError(f"{given!r:.40} is not between a second and {_DAYS_MAX} days.")
    return seconds


def shown_duration(seconds: float) -> str:
    """Return seconds in the largest two units that they fill."""
    parts: list[str] = []
    left = round(seconds)
    for unit, size in sorted(_SECONDS.items(), key=lambda pair: -pair[1]):
        count, left = divmod(left, size)
        if count and len(parts) < 2:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
