"""Transports: they move bytes from one node's memory to another's."""

from collections.abc import Sequence

from kvray.errors import TransportUnavailable
from kvray.transport.nixl import NixlTransport
from kvray.transport.object_ref import ObjectRefTransport
from kvray.transport.transport import Array, Transport

__all__ = ["Transport", "open_transports"]

_KINDS: dict[str, type[NixlTransport] | type[ObjectRefTransport]] = {
    kind.name: kind for kind in (NixlTransport, ObjectRefTransport)
}


def open_transports(
    names: Sequence[str], memory: Array
) -> tuple[dict[str, Transport], dict[str, str]]:
    """Open an end of each transport of `names`, the best first, over `memory`.

    `memory` is u8, of this node, and stays mapped until the ends are closed. Returns the ends by
    name, in that order, and for each missing one the reason.
    """
    opened: dict[str, Transport] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            opened[name] = _KINDS[name](memory)
        except TransportUnavailable as error:
            missing[name] = str(error)
    return opened, missing
