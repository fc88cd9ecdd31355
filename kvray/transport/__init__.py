"""Transports: ways to bring bytes from one node's memory into another's."""

from kvray.transport.opening import open_transports
from kvray.transport.transport import Transport

__all__ = ["Transport", "open_transports"]
