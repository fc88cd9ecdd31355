"""Transports: they move bytes from one node's memory to another's."""

from kvray.transport.opening import open_transports
from kvray.transport.transport import Transport

__all__ = ["Transport", "open_transports"]
