"""The ways of any process to its node's arena and shard, without Ray."""

from kvray.node.engine_log import BlockTokens, EngineLog, PromptCounts, PromptNotes
from kvray.node.link import NodeLink, attach
from kvray.node.registration import Registration
from kvray.node.stage_calls import StageCalls, StageReply

__all__ = [
    "BlockTokens",
    "EngineLog",
    "NodeLink",
    "PromptCounts",
    "PromptNotes",
    "Registration",
    "StageCalls",
    "StageReply",
    "attach",
]
