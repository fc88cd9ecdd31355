"""What any process of a node reaches without Ray: the arena, and its shard's socket."""

from kvray.node.link import NodeLink, attach
from kvray.node.openings import Openings
from kvray.node.registrations import Registration
from kvray.node.request_notes import RequestNotes
from kvray.node.stage_calls import StageCalls, Staged

__all__ = [
    "NodeLink",
    "Openings",
    "Registration",
    "RequestNotes",
    "StageCalls",
    "Staged",
    "attach",
]
