"""Shapes of KV caches, and one rank's pages, each byte a function of the tokens up to it.

Whatever nobody has loaded or computed is poison, in the pages and in what they are compared with:
a byte that the connector writes anywhere else, or does not write where it must, is found.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tests.trtllm.llm_request import LlmRequest

BLOCK = 4
"""Tokens in a block."""
NO_PAGE = -1
POISON = 0xFF
"""NaN in every floating-point format that is used here."""
SCRIBBLE = 0x5A


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


FLAT = Shape(name="flat", groups=(GroupShape(layers=(0, 1)),))
HEADS = Shape(name="heads", groups=(GroupShape(layers=(0, 1, 2)),), num_heads=8)
MLA = Shape(name="mla", groups=(GroupShape(layers=(0, 1, 2), own=("key",)),))
WINDOWED = Shape(
    name="windowed", groups=(GroupShape(layers=(0, 2), gap=16), GroupShape(layers=(1, 3), window=8))
)
ALL_WINDOWS = Shape(
    name="all-windows",
    groups=(GroupShape(layers=(0,), window=6), GroupShape(layers=(1,), window=16)),
)
REPLICATED = Shape(name="replicated", groups=(GroupShape(layers=(0, 1), shared=("index_key",)),))


def with_dtype(dtype: torch.dtype) -> Shape:
    name = f"flat-{dtype}"
    return Shape(name=name, groups=FLAT.groups, dtype=dtype)


class Region:
    """Pages [num_pages, size] with a gap between them, and what they should hold."""

    def __init__(
        self,
        names: tuple[str, ...],
        layers: tuple[int, ...],
        roles: tuple[str, ...],
        *,
        num_pages: int,
        token_bytes: int,
        gap: int,
    ) -> None:
        """Lay out buffers, each with the tokens of `names`, such as its heads, in turn."""
        self.buffers = [(layer, role) for layer in layers for role in roles]
        self.labels = [
            f"{name} {layer} {role}".encode() for layer, role in self.buffers for name in names
        ]
        self.size = len(self.labels) * BLOCK * token_bytes
        self.token_bytes = token_bytes
        self.memory = torch.full((num_pages, self.size + gap), POISON, dtype=torch.uint8)
        self.pages = self.memory.numpy()[:, : self.size]
        self.expected = self.pages.copy()
        self.gaps = self.memory.numpy()[:, self.size :]

    def tokens_of(self, pages: Any, page: int) -> Any:
        """Return a page as [labels, tokens, bytes]."""
        return pages[page].reshape(len(self.labels), BLOCK, self.token_bytes)

    def content(self, request: LlmRequest, block: int, end: int) -> Any:
        """Return what a page holds of the tokens of a block before `end`."""
        positions = range(block * BLOCK, min(end, (block + 1) * BLOCK))
        digests = [request.digest(position) for position in positions]
        rows = [
            _row(digest, label, self.token_bytes) for label in self.labels for digest in digests
        ]
        packed = np.frombuffer(b"".join(rows), dtype=np.uint8)
        return packed.reshape(len(self.labels), len(digests), self.token_bytes)


class Memory:
    """All pools of an engine's ranks; they have equal pages at equal places."""

    def __init__(
        self, shape: Shape, ranks: Sequence[int] = (0,), *, num_ranks: int = 1, num_pages: int
    ) -> None:
        """`ranks`: those that are here, of `num_ranks`."""
        self.shape = shape
        self._num_ranks = num_ranks
        self._ranks = [
            [self._regions(index, rank, num_pages) for index in range(len(shape.groups))]
            for rank in ranks
        ]
        self._groups = [[*itertools.chain(*each)] for each in zip(*self._ranks, strict=True)]
        """The regions of each group, on all ranks."""

    def poison(self, group: int, page: int) -> None:
        """Have a page hold nothing: it was taken, or given back."""
        for region in self._groups[group]:
            region.pages[page] = region.expected[page] = POISON

    def expect(self, request: LlmRequest, group: int, block: int, page: int, end: int) -> None:
        """Note that a page should hold the tokens of a block before `end`."""
        for region in self._groups[group]:
            content = region.content(request, block, end)
            region.tokens_of(region.expected, page)[:, : content.shape[1]] = content

    def fill_as_expected(self) -> None:
        """Fill all pages with the expected bytes."""
        for region in itertools.chain(*self._groups):
            region.pages[:] = region.expected

    def compute(
        self, request: LlmRequest, group: int, block: int, page: int, start: int, end: int
    ) -> None:
        """Write the tokens of a block from `start` to `end`."""
        first, last = max(start - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)
        for region in self._groups[group]:
            content = region.content(request, block, end)[:, first:last]
            for pages in (region.pages, region.expected):
                region.tokens_of(pages, page)[:, first:last] = content

    def copy(self, group: int, source: int, target: int) -> None:
        """Have a page hold all that another does."""
        for region in self._groups[group]:
            for pages in (region.pages, region.expected):
                pages[target] = pages[source]

    def scribble(self, group: int, page: int, row: int) -> None:
        """Write what is of no token of the request's."""
        for region in self._groups[group]:
            for pages in (region.pages, region.expected):
                region.tokens_of(pages, page)[:, row] = SCRIBBLE

    def corrupt_rows(self, request: LlmRequest, group: int, block: int, page: int, end: int) -> int:
        """Return how many rows of a block before `end` attention would read wrongly."""
        count = 0
        for region in self._groups[group]:
            content = region.content(request, block, end)
            held = region.tokens_of(region.pages, page)[:, : content.shape[1]]
            count += int((held != content).any(axis=2).sum())
        return count

    def stray_rows(self) -> int:
        """Return how many pages differ from what they should hold, wherever they are."""
        return sum(
            int((region.pages != region.expected).any(axis=1).sum())
            + int((region.gaps != POISON).sum())
            for region in itertools.chain(*self._groups)
        )

    def pool(self, at: int = 0) -> torch.Tensor:
        """Return the one pool of a rank here as the first cache manager hands it over."""
        (region,) = self._ranks[at][0]
        roles = len(self.shape.groups[0].own)
        return region.memory.view(self.shape.dtype).reshape(
            len(region.memory), len(self.shape.groups[0].layers), roles, -1
        )

    def layout(self, module: Any, at: int = 0) -> Any:
        """Return its pools as the second cache manager describes them, by classes of `module`."""
        known = {field.name for field in dataclasses.fields(module.KvCacheLayout)}
        return module.KvCacheLayout(
            tokens_per_block=BLOCK,
            **({"dtype": self.shape.dtype} if "dtype" in known else {}),
            groups=tuple(
                self._describe(module, index, regions)
                for index, regions in enumerate(self._ranks[at])
            ),
        )

    def _describe(self, module: Any, index: int, regions: list[Region]) -> Any:
        group = self.shape.groups[index]
        own, *shared = [
            module.KvCacheRegion(
                base=region.memory.data_ptr(),
                size=region.size,
                stride=region.memory.shape[1],
                num_slots=len(region.memory),
                buffers=tuple(module.KvCacheBufferRef(*one) for one in region.buffers),
            )
            for region in regions
        ]
        fields = {"replicated_regions": tuple(shared)} if shared else {}
        return module.KvCacheLayerGroupLayout(
            layer_group_id=index,
            layer_ids=group.layers,
            window_size=group.window,
            regions=(own,),
            **fields,
        )

    def _regions(self, index: int, rank: int, num_pages: int) -> list[Region]:
        group, name = self.shape.groups[index], f"group {index}"
        own: tuple[str, ...] = (name if group.own == ("key",) else f"{name} rank {rank}",)
        if self.shape.num_heads is not None:
            heads = self.shape.heads_of(rank, self._num_ranks)
            own = tuple(f"{name} head {head}" for head in heads)
        named = [(own, group.own), ((f"{name} shared",), group.shared)]
        return [
            Region(
                names,
                group.layers,
                roles,
                num_pages=num_pages,
                token_bytes=self.shape.token_bytes,
                gap=group.gap,
            )
            for names, roles in named
            if roles
        ]


@lru_cache(maxsize=200_000)
def _row(digest: bytes, label: bytes, size: int) -> bytes:
    return hashlib.blake2b(digest + label, digest_size=size).digest()
