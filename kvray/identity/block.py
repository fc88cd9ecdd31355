"""The name of a block: its key, and the namespace that seeds the keys.

`readable_parts` says which parts of a block have the bytes of a rank of an engine of another size.
"""

import hashlib
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NewType

from kvray.errors import ConfigError

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the sha256 digest chained over all tokens up to and including the block's."""

KEY_BYTES = 32
KEY_FORMAT_VERSION = 2
UNNAMED = "fingerprinting"
"""`Namespace.model` of a rank whose model, or whose weights, have no name now.

Nothing is keyed with it: two models may have it at once.
"""


def split_keys(keys: bytes) -> list[BlockKey]:
    """Return the keys that lie end to end in `keys`, which ends with a whole key."""
    return [BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


def head_number(key: BlockKey) -> int:
    """Return the number that all blocks of a chain have, from its first key: 24 bits, never 0."""
    return int.from_bytes(key[-3:], "little") or 1


def namespace_id(digest: bytes) -> int:
    """Return an arena's number of a namespace: 4 bytes of its digest, little-endian; 0: unknown."""
    return int.from_bytes(digest[:4], "little")


def frame(*items: bytes) -> bytes:
    """Join `items`, each behind its u64 length: different lists never give equal bytes."""
    return b"".join(struct.pack("<Q", len(item)) + item for item in items)


def tagged(value: str | int, *, what: str) -> bytes:
    """Return `value` as bytes that tell text from number and are equal in every process.

    Not `repr`, which writes a numpy integer or a character that is new to Unicode differently from
    one installation to the next. A lone surrogate, which JSON can carry, is kept as it is.
    ConfigError: it is neither; the message calls it `what`.
    """
    if isinstance(value, str):
        return b"str:" + value.encode("utf-8", "surrogatepass")
    try:
        return b"int:%x" % operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{what} must be a text or a whole number, not a {type(value).__name__}."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """All that makes blocks of equal tokens unequal bytes, one field a cause.

    Two replicas share blocks exactly if every field is equal. `part` figures describe the bytes
    that one rank holds of a block.
    """

    model: str
    """`model_key`, the fingerprint of the checkpoint, or `UNNAMED` while neither is known."""
    weights: str = ""
    """The version of weights that a running engine was given; empty: the checkpoint's own."""
    quantization: str
    """Weight and KV quantisation, as the engine names them."""
    overrides: str
    """RoPE, length and other overrides of the checkpoint's own configuration."""
    kv_dtype: str
    """Element type of the pool."""
    num_layers: int
    kv_factor: int
    """2 for separate keys and values, 1 for a latent (MLA) cache."""
    tokens_per_block: int
    part_bytes: int
    """Bytes of one rank's part of a block."""
    num_parts: int
    """Ranks that each hold different bytes of a block."""
    tp_layout: str
    """How heads are dealt to ranks, for example `tp2`."""
    layer_groups: str
    """Layers whose pages are counted together, their windows, and the contents of a page."""
    attention_backend: str
    engine: str
    """Engine name and major.minor version."""
    key_format: int = KEY_FORMAT_VERSION

    def digest(self) -> bytes:
        """Return the 32 bytes that stand for this namespace in every key.

        They are the sha256 of the framed items `kvray.namespace` and, field by field, its name and
        its value, a text as `str:` and its UTF-8, a number as `int:` and its hex digits.
        """
        items = [b"kvray.namespace"]
        for field in fields(self):
            items += field.name.encode(), tagged(getattr(self, field.name), what=field.name)
        return hashlib.sha256(frame(*items)).digest()

    def named(self, model: str, weights: str | None) -> "Namespace":
        """Return it with the names of model (empty: none yet) and weights (None: none now).

        It is `UNNAMED` without one of them.
        """
        if not model or weights is None:
            return replace(self, model=UNNAMED, weights="")
        return replace(self, model=model, weights=weights)

    def difference(self, other: "Namespace") -> dict[str, tuple[object, object]]:
        """Return field -> (own value, other's value) for every field that differs."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}

    def to_wire(self) -> dict[str, object]:
        """Return a plain mapping for msgpack; `from_wire` is its inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_wire(cls, values: Mapping[str, object]) -> "Namespace":
        """Return the namespace of `to_wire`'s mapping; TypeError: a field is missing or unknown."""
        return cls(**values)  # type: ignore[arg-type]


def readable_ranks(rank: int, num_ranks: int, stored_by: int) -> range:
    """Return the ranks, among `stored_by`, whose bytes `rank` among `num_ranks` reads.

    One of the two numbers is a multiple of the other.
    """
    if stored_by < num_ranks:
        wide = rank * stored_by // num_ranks
        return range(wide, wide + 1)
    ratio = stored_by // num_ranks
    return range(rank * ratio, (rank + 1) * ratio)


def readable_parts(parts: Sequence[int], num_ranks: int, stored_by: int) -> list[int]:
    """Return the parts, of a block of `stored_by` ranks, with the bytes of a rank's own `parts`.

    Parts are numbered layer group by layer group, and in each by rank.
    """
    return [
        part // num_ranks * stored_by + other
        for part in parts
        for other in readable_ranks(part % num_ranks, num_ranks, stored_by)
    ]
