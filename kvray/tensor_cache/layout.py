"""What callers give, as blocks: a model's figures, KV tensors as bytes, a prompt's keys and mask.

A block is stored as [num_layers, 2, num_kv_heads, tokens_per_block, head_size], keys before values,
whatever the layout of the tensors; TensorRT-LLM's pools have this order too. Elements are moved as
integers of their size: no conversion, no NaN that changes its payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity import keys
from kvray.identity.block import BlockKey, Namespace
from kvray.store.arena.payload import runs
from kvray.store.arena.tables import Array

TensorLayout = Literal["huggingface", "vllm"]
"""Order of the dimensions of one layer's keys or values; see `TensorMetadata`."""

ENGINE = "kvray.tensor_cache 1"
"""Name and version of the format in which blocks are stored (see the module)."""

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
        is_type = isinstance(dtype, torch.dtype) and dtype.itemsize <= 8
        # Torch ends the process where a quantized tensor is viewed as integers.
        if not is_type or str(dtype).startswith("torch.q"):
            raise ConfigError(
                "dtype must be a plain torch.dtype of at most 8 bytes such as torch.bfloat16, not"
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


def _quoted(text: str) -> str:
    """Return `text` without an `@`, so that name and revision cannot run into each other."""
    return quote(text, safe="/", errors="surrogatepass")


KV: TypeAlias = Sequence[Sequence[torch.Tensor]] | torch.Tensor
"""A (keys, values) pair for each layer, or one tensor [num_layers, 2, ...]."""

Heads: TypeAlias = list[torch.Tensor]
"""Keys and values of layer 0, of layer 1 and so on: views of integers, each of shape [num_kv_heads,
num_tokens, head_size]."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def heads_of(kv: KV, metadata: TensorMetadata) -> Heads:
    """Return `kv` as views of heads; LayoutMismatch: it does not fit `metadata`."""
    try:
        pairs = [tuple(pair) for pair in kv]
    except TypeError:
        raise _no_kv(f"is a {type(kv).__name__} that holds no pairs of tensors") from None
    if len(pairs) != metadata.num_layers:
        raise _no_kv(f"has {len(pairs)} layers, not {metadata.num_layers}")
    heads = []
    for layer, pair in enumerate(pairs):
        if len(pair) != 2:
            raise LayoutMismatch(
                f"Layer {layer} of the KV holds {len(pair)} things; give a pair (keys, values)."
            )
        heads += [_heads(tensor, layer, metadata) for tensor in pair]
    counts = {one.shape[1] for one in heads}
    if len(counts) > 1:
        raise LayoutMismatch(
            f"The KV's tensors hold different numbers of tokens ({sorted(counts)}); all layers'"
            " keys and values must be of the same tokens."
        )
    return heads


def empty_blob(num_tokens: int, metadata: TensorMetadata) -> torch.Tensor:
    """Return an uninitialised CPU tensor [num_layers, 2, ...] in the layout of `metadata`."""
    shape = metadata.num_layers, 2, *_shape(num_tokens, metadata)
    return torch.empty(shape, dtype=metadata.dtype, device="cpu")


def cut(blob: torch.Tensor, num_tokens: int, metadata: TensorMetadata) -> torch.Tensor:
    """Return the first `num_tokens` of `blob`, as a tensor of their own."""
    return blob.narrow(2 + _token_dim(metadata), 0, num_tokens).contiguous()


def pack(heads: Heads, blocks: Array, metadata: TensorMetadata) -> Array:
    """Return the bytes of some blocks of `heads`, u8 [num_blocks, block_bytes].

    `heads` may be on any device. `blocks` are ascending indexes from the first token on.
    """
    size = metadata.tokens_per_block
    block_bytes = np.empty((len(blocks), metadata.block_bytes), dtype=np.uint8)
    pool = _elements(block_bytes, metadata)
    for start, stop in runs(np.diff(blocks) != 1, len(blocks)):
        first = int(blocks[start]) * size
        for index, one in enumerate(heads):
            run = one[:, first : first + (stop - start) * size].unflatten(1, (stop - start, size))
            # By numpy: torch's threads wait for each other, long on a machine with other work.
            np.copyto(pool[start:stop, index], run.transpose(0, 1).cpu().numpy())
    return block_bytes


def unpack(block_bytes: Array, heads: Heads, first: int, metadata: TensorMetadata) -> None:
    """Write u8 [num_blocks, block_bytes] into `heads` on the CPU; the inverse of `pack`.

    `first` is the index of the first block, from the first token of `heads` on.
    """
    num_blocks, size = len(block_bytes), metadata.tokens_per_block
    if num_blocks == 0:
        return
    pool = _elements(block_bytes, metadata)
    for index, one in enumerate(heads):
        run = one[:, first * size : (first + num_blocks) * size]
        into = run.unflatten(1, (num_blocks, size)).numpy()
        np.copyto(into, pool[:, index].swapaxes(0, 1))


def _heads(tensor: torch.Tensor, layer: int, metadata: TensorMetadata) -> torch.Tensor:
    """Return one tensor of a layer as [num_kv_heads, num_tokens, head_size] integers."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutMismatch(
            f"Layer {layer} of the KV holds a {type(tensor).__name__}; give torch tensors."
        )
    if tensor.dtype != metadata.dtype:
        raise LayoutMismatch(
            f"Layer {layer} of the KV is of {tensor.dtype}, not {metadata.dtype}; make the cache"
            " with the tensors' dtype in its metadata: nothing is converted."
        )
    token_dim = _token_dim(metadata)
    fits = tensor.ndim == 3 and tensor.shape == _shape(tensor.shape[token_dim], metadata)
    if not fits or tensor.layout != torch.strided or tensor.is_meta:
        order = ", ".join(map(str, _shape("num_tokens", metadata)))
        batched = tensor.ndim == 4 and tensor.shape[0] == 1
        fix = "take the batch dimension off with tensor[0]" if batched else "see the metadata"
        raise LayoutMismatch(
            f"Layer {layer} of the KV is a tensor of shape {list(tensor.shape)}, where the layout"
            f" {metadata.layout!r} has dense ones of [{order}]; {fix}."
        )
    return tensor.detach().view(_BITS[metadata.dtype.itemsize]).movedim(token_dim, 1)


def _no_kv(problem: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"The KV {problem}; give one (keys, values) pair for each layer, or one tensor"
        " [num_layers, 2, ...]."
    )


def _shape(num_tokens: Any, metadata: TensorMetadata) -> tuple[Any, ...]:
    """Return the shape of one layer's keys or values."""
    heads, size = metadata.num_kv_heads, metadata.head_size
    by_head = metadata.layout == "huggingface"
    return (heads, num_tokens, size) if by_head else (num_tokens, heads, size)


def _token_dim(metadata: TensorMetadata) -> int:
    return 1 if metadata.layout == "huggingface" else 0


def _elements(block_bytes: Array, metadata: TensorMetadata) -> Array:
    """Return blocks as integers [num_blocks, 2 * num_layers, heads, tokens, head_size]."""
    elements = block_bytes.view(f"i{metadata.dtype.itemsize}")
    size = metadata.num_kv_heads, metadata.tokens_per_block, metadata.head_size
    return elements.reshape(len(block_bytes), 2 * metadata.num_layers, *size)


Tokens: TypeAlias = keys.Tokens | torch.Tensor
Mask: TypeAlias = torch.Tensor | npt.NDArray[Any] | list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPrompt:
    """A token list as blocks, and the suffix of them that a call is about."""

    num_tokens: int
    num_masked: int
    """Leading tokens that the mask leaves out."""
    first: int
    """Index of the first block of the suffix."""
    keys: list[BlockKey]
    """Keys of all full blocks, those that the mask leaves out too."""

    @property
    def num_blocks(self) -> int:
        """Full blocks of the suffix."""
        return max(0, len(self.keys) - self.first)


def read_prompt(
    tokens: Tokens, mask: Mask | None, *, tokens_per_block: int, seed: bytes | None
) -> MaskedPrompt:
    """Return the prompt of `tokens` and `mask`.

    `tokens` are ids, shape [num_tokens], on any device. `mask` has booleans, shape [num_tokens]:
    False for some leading tokens and True for all others; None: all True. `seed` is from
    `request_seed`; None: no prompt has keys now. ConfigError: tokens that are not integers, or a
    mask that selects no suffix or begins inside a block.

    Source: suffix masks that begin at a chunk, as in LMCache's LMCacheEngine.
    """
    on_host = tokens.detach().cpu() if isinstance(tokens, torch.Tensor) else tokens
    packed = keys.pack_tokens(on_host)  # type: ignore[arg-type]  # it reads CPU tensors, too
    num_masked = 0 if mask is None else _num_masked(mask, len(packed))
    first, inside = divmod(num_masked, tokens_per_block)
    if inside:
        raise ConfigError(
            f"The mask leaves out {num_masked} tokens, which ends inside a block; leave out a"
            f" multiple of tokens_per_block = {tokens_per_block}, for example"
            f" {first * tokens_per_block}."
        )
    if seed is None:
        return MaskedPrompt(num_tokens=len(packed), num_masked=num_masked, first=0, keys=[])
    return MaskedPrompt(
        num_tokens=len(packed),
        num_masked=num_masked,
        first=first,
        keys=keys.chain_keys(packed, tokens_per_block=tokens_per_block, seed=seed),
    )


def _num_masked(mask: Mask, num_tokens: int) -> int:
    on_host = mask.detach().cpu() if isinstance(mask, torch.Tensor) else mask
    try:
        flags = np.asarray(on_host)
    except (TypeError, ValueError) as error:  # of numbers that numpy lacks, or unlike lengths
        raise ConfigError(
            f"A mask must have one boolean for each of the {num_tokens} tokens ({error})."
        ) from None
    if flags.shape != (num_tokens,) or (flags.dtype != np.bool_ and num_tokens):
        raise ConfigError(
            f"A mask must have one boolean for each of the {num_tokens} tokens, not be"
            f" {flags.dtype} of shape {list(flags.shape)}."
        )
    num_masked = num_tokens - int(np.count_nonzero(flags))
    if flags[:num_masked].any():
        raise ConfigError(
            "A mask must be False for leading tokens and True for all others (a suffix); this one"
            " has a True before a False."
        )
    return num_masked
