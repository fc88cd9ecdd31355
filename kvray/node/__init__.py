"""The ways of any process to its node's arena and shard, without Ray."""

from kvray.node.block_tokens import BlockTokens
from kvray.node.link import NodeLink, attach
from kvray.node.prompt_notes import PromptNotes
from kvray.node.registrations import Registration
from kvray.node.request_notes import RequestNotes
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
