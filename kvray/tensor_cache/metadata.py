"""A model's figures for a `TensorCache`, and the namespace that follows from them."""

from dataclasses import dataclass, fields
from typing import Literal, get_args
from urllib.parse import quote

import torch

from kvray.errors import ConfigError
from kvray.identity.block import Namespace

TensorLayout = Literal["huggingface", "vllm"]
"""Order of the dimensions of one layer's keys or values; see `TensorMetadata`."""

ENGINE = "kvray.tensor_cache 1"
"""Name and version of the format in which blocks are stored (see `layout`)."""

_COUNTS = ("num_layers", "num_kv_heads", "head_size", "tokens_per_block", "world_size")
_LEAST = dict.fromkeys(_COUNTS, 1) | {"rank": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """The model whose KV is cached, and the shape in which its tensors come and go.

    Two caches share blocks exactly if all fields but `layout` are equal. Blocks are stored in one
    order, whichever order the tensors have.

    Args:
        model: path of a checkpoint, or any name. A path stands for the checkpoint's content,
            wherever it lies; the first cache reads all of it. Two models of one name share
            blocks: tell them apart by `revision`.
        dtype: element type of the tensors, of at most 8 bytes; nothing is ever converted.
        num_layers: layers with keys and values.
        num_kv_heads: heads of keys and values that this rank holds.
        head_size: elements of one head's key or value for one token.
        layout: order of the dimensions of one layer's keys or values:
            "huggingface" is [num_kv_heads, num_tokens, head_size],
            "vllm" is [num_tokens, num_kv_heads, head_size]. Neither has a batch dimension. A KV
            is a (keys, values) pair of such tensors for each layer, or one tensor with
            [num_layers, 2] in front.
        tokens_per_block: tokens that are stored, found and evicted as one.
        revision: revision of a model that is given by name.
        variant: whatever else changes this model's KV: an adapter, weight quantisation, RoPE
            scaling.
        rank: this process among the `world_size` processes that share the heads or layers, from
            0. Each rank has blocks of its own; ranks that must agree take the least of their
            `lookup`s.
        world_size: number of those processes.
        salt: text or number that keeps tenants apart: caches of different salts never share.

    Raises:
        ConfigError: a value that no model has.
    """

    model: str
    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    head_size: int
    layout: TensorLayout = "huggingface"
    tokens_per_block: int = 32
    revision: str = ""
    variant: str = ""
    rank: int = 0
    world_size: int = 1
    salt: str | int | None = None

    def __post_init__(self) -> None:
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, least in _LEAST.items():
            count = values[name]
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise ConfigError(
                    f"{name} must be a whole number of at least {least}, not {count!r}."
                )
        if self.rank >= self.world_size:
            raise ConfigError(
                f"rank {self.rank} is not below world_size {self.world_size}; ranks count from 0."
            )
        if self.layout not in get_args(TensorLayout):
            raise ConfigError(
                f"layout must be 'huggingface' or 'vllm', not {self.layout!r}: [num_heads,"
                " num_tokens, head_size] or [num_tokens, num_heads, head_size]."
            )
        dtype, model = values["dtype"], values["model"]
        if not isinstance(dtype, torch.dtype) or dtype.itemsize > 8:
            raise ConfigError(
                "dtype must be a torch.dtype of at most 8 bytes such as torch.bfloat16, not"
                f" {dtype!r}."
            )
        if not isinstance(model, str) or not model:
            raise ConfigError(
                f"model must be a name or the path of a checkpoint, not {model!r}: all that have"
                " no name would share blocks."
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this rank."""
        elems = self.num_kv_heads * self.tokens_per_block * self.head_size
        return 2 * self.num_layers * elems * self.dtype.itemsize

    def namespace(self, *, fingerprint: str | None = None) -> Namespace:
        """Return the namespace of the blocks, which leaves `layout` and `salt` out.

        `fingerprint` is the checkpoint's, if `model` is the path of one.
        """
        model = f"name:{_quoted(self.model)}" if fingerprint is None else fingerprint
        return Namespace(
            model=f"{model}@{_quoted(self.revision)}" if self.revision else model,
            quantization="",
            overrides=self.variant,
            kv_dtype=str(self.dtype).removeprefix("torch."),
            num_layers=self.num_layers,
            kv_factor=2,
            tokens_per_block=self.tokens_per_block,
            part_bytes=self.block_bytes,
            num_parts=1,
            tp_layout=(
                f"rank {self.rank} of {self.world_size}: {self.num_kv_heads} heads of"
                f" {self.head_size}"
            ),
            layer_groups="",
            attention_backend="",
            engine=ENGINE,
        )

    def difference(self, other: "TensorMetadata") -> list[str]:
        """Return the names of the fields that differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


def _quoted(text: str) -> str:
    """Return `text` without an `@`, so that name and revision cannot run into each other."""
    return quote(text, safe="/", errors="surrogatepass")
