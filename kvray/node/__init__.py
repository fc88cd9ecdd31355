"""The parts of a tier that any process of a node reaches without Ray: arena and shard socket."""

from kvray.node.link import NodeLink, attach
from kvray.node.prefix_digests import PrefixDigests
from kvray.node.registrations import Registration
from kvray.node.request_notes import RequestNotes
from kvray.node.stage_calls import StageCalls, StageReply

__all__ = [
    "NodeLink",
    "PrefixDigests",
    "Registration",
    "RequestNotes",
    "StageCalls",
    "StageReply",
    "attach",
]
