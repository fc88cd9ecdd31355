"""The messages of KV events, in the format that vLLM began and TensorRT-LLM and Dynamo share; pure.

A batch is msgpack, `[timestamp, [event, ...], dp_rank]`, or a map of them. An event is a map with
its `type`; older publishers send a list that begins with it. See docs/kv_events.md.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, TypeAdapter

from kvray.errors import TransferError
from kvray.wire import at_most

HOST_MEDIUM, DISK_MEDIUM, GPU_MEDIUM = "CPU", "STORAGE", "GPU"
END = -1
"""The sequence number that ends a replay."""
HASH_BYTES_MAX = 64
_LISTS_MAX = 100_000
"""Lists and maps of a batch: empty ones take 50 times their bytes."""
_SEQUENCE = struct.Struct(">q")

_Hash = (
    Annotated[int, Field(ge=-(2**63), lt=2**64)]
    | Annotated[bytes, Field(max_length=HASH_BYTES_MAX)]
)
_Small = Annotated[int, Field(ge=0, lt=2**31)]
_Token = Annotated[int, Field(ge=0, lt=2**32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks of one chain, in prefix order, that `medium` has now."""

    block_hashes: Sequence[_Hash]
    parent_block_hash: _Hash | None = None
    """Of the block before the first; None: the first begins a prompt."""
    token_ids: Sequence[_Token]
    """Of all blocks end to end, `block_size` each."""
    block_size: Annotated[int, Field(ge=1, lt=2**31)]
    lora_id: int | None = None
    medium: str | None = None
    """`GPU`, `CPU` (host memory) or `STORAGE` (disk); None is the engine's own pool."""
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None
    """For each block what else its hash depends on, in the publisher's form."""
    group_idx: _Small | None = None
    """The layer group, where a publisher tells them apart."""
    kv_cache_spec_kind: str | None = None
    """What the group's layers keep, such as `full_attention` or `mamba`; None: not said."""
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """`LOCAL` or `REMOTE`, as the publisher sees the medium; None: local."""
    type: Literal["BlockStored"] = "BlockStored"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that `medium` has no longer."""

    block_hashes: Sequence[_Hash]
    medium: str | None = None
    group_idx: _Small | None = None
    locality: str | None = None
    type: Literal["BlockRemoved"] = "BlockRemoved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The publisher has nothing any more, in any medium."""

    type: Literal["AllBlocksCleared"] = "AllBlocksCleared"


Event = BlockStored | BlockRemoved | AllBlocksCleared

_FIELDS = {
    kind.__name__: tuple(one.name for one in fields(kind) if one.name != "type")
    for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
"""The fields of events that are lists, in their order, which is that of the classes."""
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
_RANK: TypeAdapter[int | None] = TypeAdapter(_Small | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events that belong together, in order."""

    at: float  # seconds since the epoch
    events: Sequence[Event]
    dp_rank: int | None = None


def pack(batch: Batch) -> bytes:
    """Return a batch as bytes; fields that say nothing are left out."""
    events = [
        {
            name: value
            for name in ("type", *_FIELDS[event.type])
            if (value := getattr(event, name)) is not None or name == "parent_block_hash"
        }
        for event in batch.events
    ]
    packed: bytes = msgpack.packb([batch.at, events, batch.dp_rank])
    return packed


def unpack(payload: bytes) -> Batch:
    """Return the batch of any publisher; fields and events that are new to us are passed over.

    TransferError: these bytes are no batch.
    """
    try:
        read = msgpack.unpackb(
            payload,
            use_list=False,
            strict_map_key=False,
            max_ext_len=0,
            list_hook=(counted := at_most(_LISTS_MAX)),
            object_hook=counted,
        )
        if isinstance(read, dict):
            read = read["ts"], read["events"], read.get("data_parallel_rank")
        at, events, *rest = read
        named = [_named(event) for event in events]
        return Batch(
            at=float(at),
            events=tuple(_EVENT.validate_python(one) for one in named if one["type"] in _FIELDS),
            dp_rank=_RANK.validate_python(rest[0] if rest else None),
        )
    except (
        *(TypeError, ValueError, KeyError, OverflowError, RecursionError),
        msgpack.UnpackException,
    ) as error:
        raise TransferError(
            f"A KV event is not in the format that is read: {error}"[:500]
        ) from None


def _named(event: Any) -> dict[str, Any]:
    """Return an event as a map, whichever form it came in."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), values, strict=False))}


def pack_sequence(number: int) -> bytes:
    """Return a sequence number's frame."""
    return _SEQUENCE.pack(number)


def unpack_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; TransferError: it is none."""
    if len(frame) != _SEQUENCE.size:
        raise TransferError(f"A sequence number has {_SEQUENCE.size} bytes, not {len(frame)}.")
    number: int = _SEQUENCE.unpack(frame)[0]
    return number
