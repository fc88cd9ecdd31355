"""The ways of any process to its node's arena and shard, without Ray."""

from kvray.node.link import NodeLink, attach
from kvray.node.registrations import Registration
from kvray.node.request_notes import BlockTokens, PromptNotes, RequestNotes
from kvray.node.stage_calls import StageCalls, StageReply

__all__ = [
    "BlockTokens",
    "NodeLink",
    "PromptNotes",
    "Registration",
    "RequestNotes",
    "StageCalls",
    "StageReply",
    "attach",
]
