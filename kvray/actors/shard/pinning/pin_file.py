"""The file beside the arena with a node's pins: they outlive its shard."""

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import msgpack
import xxhash

from kvray.actors.owner.ownership import PINS_FILE
from kvray.actors.shard.pinning.pin import Pin

_log = logging.getLogger("kvray.shard")

_SUM_BYTES = 8
_BYTES_MAX = 64 * 2**20


def read_pins(directory: Path) -> list[Pin]:
    """Return the pins that were saved last; [] without a file, or from a damaged one."""
    path = directory / PINS_FILE
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ValueError("it is too long")
        content = path.read_bytes()
        saved_sum, body = content[:_SUM_BYTES], content[_SUM_BYTES:]
        if saved_sum != _sum(body):
            raise ValueError("its checksum is wrong")
        return [Pin.from_values(one) for one in msgpack.unpackb(body)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s is left out, pins come from other nodes: %s", path, error)
        return []


def save_pins(directory: Path, pins: Iterable[Pin]) -> None:
    """Replace the file; a fault is logged, and costs the pins only if the shard ends too."""
    body = msgpack.packb([asdict(pin) for pin in pins])
    path = directory / PINS_FILE
    draft = path.with_suffix(".new")
    try:
        draft.write_bytes(_sum(body) + body)
        os.replace(draft, path)
    except OSError as error:
        _log.warning("%s cannot be written: %s", path, error)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _sum(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body)
