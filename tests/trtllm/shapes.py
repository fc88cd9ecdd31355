"""Shapes of KV caches: layer groups, what lies in a page, and what differs from rank to rank."""

from dataclasses import dataclass

import torch

BLOCK = 4
"""Tokens in a block."""


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """Layers whose pages are counted together; one region of own bytes, perhaps one of shared."""

    layers: tuple[int, ...]
    own: tuple[str, ...] = ("key", "value")
    """Roles of each layer's buffers that differ from rank to rank."""
    shared: tuple[str, ...] = ()
    window: int | None = None
    gap: int = 0
    """Bytes between two pages of a region."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    groups: tuple[GroupShape, ...]
    dtype: torch.dtype = torch.float16
    token_bytes: int = 16
    """Of one token, layer and role; with `num_heads` of one head, too."""
    num_heads: int | None = None
    """KV heads that ranks share out, one after the other in a buffer; None: a rank's bytes are its
    own, however many ranks there are."""

    def heads_of(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return a rank's heads; ranks share one if there are more ranks than heads."""
        assert self.num_heads is not None, "only shapes with heads have some"
        first, count = rank * self.num_heads // num_ranks, max(1, self.num_heads // num_ranks)
        return tuple(range(first, first + count))

    @property
    def is_latent(self) -> bool:
        """Whether all bytes of the first group are the same on all ranks: one role, the key."""
        return self.groups[0].own == ("key",)


FLAT = Shape(name="flat", groups=(GroupShape(layers=(0, 1)),))
HEADS = Shape(name="heads", groups=(GroupShape(layers=(0, 1, 2)),), num_heads=8)
MLA = Shape(name="mla", groups=(GroupShape(layers=(0, 1, 2), own=("key",)),))
WINDOWED = Shape(
    name="windowed",
    groups=(
        GroupShape(layers=(0, 2), gap=16),
        GroupShape(layers=(1, 3), window=8),
    ),
)
ALL_WINDOWS = Shape(
    name="all-windows",
    groups=(GroupShape(layers=(0,), window=6), GroupShape(layers=(1,), window=16)),
)
REPLICATED = Shape(
    name="replicated",
    groups=(GroupShape(layers=(0, 1), shared=("index_key",)),),
)


def with_dtype(dtype: torch.dtype) -> Shape:
    name = f"flat-{dtype}"
    return Shape(name=name, groups=FLAT.groups, dtype=dtype)
