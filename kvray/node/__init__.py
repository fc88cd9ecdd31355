"""What any process of a node reaches without Ray: the arena, and its shard's socket."""

from kvray.node.link import NodeLink, attach
from kvray.node.openings import Openings
from kvray.node.registrations import Registration

__all__ = ["NodeLink", "Openings", "Registration", "attach"]
