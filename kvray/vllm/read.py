"""What kvray reads of vLLM: requests, settings, and the caches that it registers.

Whatever enters the keys and values of a request beside its tokens enters its keys, or makes it
bypass the cache. Source: `vllm/v1/request.py`, and `generate_block_hash_extra_keys` in
`vllm/v1/core/kv_cache_utils.py`, of vLLM 0.32. Set-ups of vLLM that kvray would serve wrongly are
refused at the start.

vLLM registers a tensor a layer, cut into blocks as `KVCacheConfig` says. Layer `i` of a
`KVCacheTensor` has its bytes of block `b` at `offset + i * layer_stride + b * block_stride` of the
storage that its tensors share. Source: `vllm/v1/kv_cache_interface.py` of vLLM 0.32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvray.engine.cache_layout import CacheLayout, Group, LayerRange, Region
from kvray.engine.engine_args import EngineArgs, field_of, number_of
from kvray.engine.model_name import Adapters, fingerprints_dir
from kvray.engine.request import Identity, Prompt
from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.keys import MediaItem


class RequestReader:
    """Used by the thread of vLLM's scheduler."""

    def __init__(self, args: EngineArgs) -> None:
        self._adapters = Adapters(settings=args.adapters, cache_dir=fingerprints_dir())

    def read(self, request: Any, number: int, num_computed: int) -> Prompt | str:
        """Return a request as the leader knows it, or why it bypasses the cache.

        ConfigError: its adapter cannot be read.
        """
        identity = self._identify(request)
        if isinstance(identity, str):
            return identity
        tokens = list(request.all_token_ids)  # one that was preempted has generated some
        return Prompt(
            request_id=number,
            tokens=tokens,
            prompt_len=len(tokens),
            num_computed=num_computed,
            identity=identity,
            is_unread=bool(request.skip_reading_prefix_cache),  # such as for prompt logprobs
            name=request.request_id,
        )

    def _identify(self, request: Any) -> Identity | str:
        # An adapter is looked at though its request may bypass: vLLM keeps blocks of that, too.
        asked = request.lora_request
        lora = None if asked is None else self._fingerprint(asked)
        if asked is not None and asked.load_inplace:
            return "its LoRA adapter is loaded in the place of another"
        if asked is not None and lora is None:
            return "its LoRA adapter is not on this machine, not read yet, or has changed since"
        media = _media_items(request.mm_features)
        if media is None:
            return "it has media without a name"
        if _has_more_than_tokens(request):
            return "it has embeddings for tokens, grows while it runs, or is not to generate"
        return Identity(salt=request.cache_salt, lora=lora, media=media)

    def _fingerprint(self, asked: Any) -> bytes | None:
        path = asked.lora_path
        try:
            return self._adapters.fingerprint(asked.lora_int_id, path, cached_as=asked.lora_name)
        except ConfigError:
            if Path(path).is_absolute():
                raise
            return None  # a name on a hub may mean other weights now than those that vLLM has


def _has_more_than_tokens(request: Any) -> bool:
    """Whether a request has embeddings for tokens, grows while it runs, or is not to generate."""
    has_embeds = request.prompt_token_ids is None or request.prompt_embeds is not None
    is_mixed = request.prompt_is_token_ids is not None
    return has_embeds or is_mixed or request.resumable or request.pooling_params is not None


def _media_items(features: list[Any]) -> tuple[MediaItem, ...] | None:
    """Return the media of a request; None if there is one that vLLM does not name.

    vLLM's name of an item is a hash of its content and of what the processor was told to make of
    it, or what the caller of the API vouches for.
    """
    items = []
    for feature in features:
        place, name = feature.mm_position, feature.identifier
        if not isinstance(name, str) or not name:
            return None
        mask = b"" if place.is_embed is None else bytes(place.is_embed.cpu().numpy().tobytes())
        extent = f"{feature.modality} {place.length}".encode()
        digest = frame(name.encode(), extent, mask)
        items.append(MediaItem(position=place.offset, digest=digest))
    return tuple(items)


_CACHE_DTYPES = {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
"""Those whose blocks are all there is to a block: no scales beside it."""


_KEPT = {"FullAttentionSpec", "MLAAttentionSpec"}
"""Kinds of caches whose pages a request has until its end.

Source: `single_type_kv_cache_manager.py`; the others put the null block in the place of a page that
no window reaches any more.
"""


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise ConfigError for a setting that kvray cannot serve."""
    for is_so, sentence in _reasons(vllm_config):
        if is_so:
            raise ConfigError(sentence)


def _reasons(vllm_config: Any) -> Iterator[tuple[bool, str]]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in (
        "nnodes",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = number_of(parallel, name, 1)
        yield size > 1, f"{name} is {size}; kvray serves vLLM with 1."
    launcher = field_of(parallel, "distributed_executor_backend")
    yield (
        launcher == "external_launcher" and number_of(parallel, "tensor_parallel_size", 1) > 1,
        "With distributed_executor_backend external_launcher each rank has a scheduler, and all"
        " must decide alike, but what they find in the cache comes at different times; choose mp.",
    )
    device = str(field_of(field_of(vllm_config, "device_config"), "device_type"))
    yield (
        device not in ("cpu", "cuda") or torch.version.hip is not None,
        "kvray copies by the driver of NVIDIA's GPUs, or on the CPU; with other devices leave"
        " --kv-transfer-config out.",
    )
    yield (
        field_of(vllm_config, "speculative_config") is not None,
        "speculative_config is set; kvray does not serve speculative decoding with vLLM yet, so"
        " leave it or --kv-transfer-config out.",
    )
    dtype = field_of(cache, "cache_dtype")
    yield (
        str(dtype) not in _CACHE_DTYPES,
        f"cache_dtype is {dtype!r}, which has scales beside the blocks; kvray serves"
        f" {', '.join(sorted(_CACHE_DTYPES))}.",
    )
    yield (
        bool(field_of(cache, "kv_sharing_fast_prefill")),
        "kv_sharing_fast_prefill is set, which leaves blocks unfilled; switch it off.",
    )
    model = field_of(vllm_config, "model_config")
    yield (
        callable(field_of(model, "hf_overrides")),
        "hf_overrides is a function, which nothing tells from others; give a dictionary.",
    )
    # Then media have a number in place of a hash, see `BaseRenderer._process_mm_uuids`.
    media = field_of(model, "multimodal_config")
    is_numbered = media is not None and field_of(media, "mm_processor_cache_gb") == 0
    yield (
        is_numbered and not field_of(cache, "enable_prefix_caching"),
        "Without prefix caching and with --mm-processor-cache-gb 0 vLLM does not tell one picture"
        " from another; leave one of them on.",
    )
    # `Scheduler.schedule` takes back a request of the same pass, whose blocks `allocate_slots` has
    # let others find by then: vllm-project/vllm pull request 43569.
    policy = field_of(field_of(vllm_config, "scheduler_config"), "policy")
    yield (
        policy == "priority" and bool(field_of(cache, "enable_prefix_caching")),
        "With --scheduling-policy priority vLLM's prefix cache may have blocks that nobody"
        " computed; leave it, or add --no-enable-prefix-caching.",
    )
    role = field_of(vllm_config.kv_transfer_config, "kv_role")
    yield role != "kv_both", f"kv_role is {role!r}; kvray loads and saves, so set it to kv_both."


def read_layout(kv_caches: dict[str, torch.Tensor], config: Any) -> CacheLayout:
    """Return the layout of a rank's cache; the names of `kv_caches` are those of vLLM's layers.

    ConfigError: it is not one group of layers of which each has its bytes to itself, or a layer
    lies elsewhere than `config` says.
    """
    group = only_group(config)
    numbers = {name: number for number, name in enumerate(group.layer_names)}
    regions = tuple(_regions(kv_caches, config, numbers))
    read = {layer for region in regions for step in region.steps for layer in step.layers}
    missing = [name for name, number in numbers.items() if number not in read]
    if missing:
        raise ConfigError(
            f"vLLM registered no cache for {len(missing)} layers, {missing[0]} the first; kvray"
            " serves models whose layers all have a KV cache of their own."
        )
    spec = group.kv_cache_spec
    is_latent = getattr(spec, "head_size_v", None) == 0
    own, shared = ((), regions) if is_latent else (regions, ())
    return CacheLayout(
        groups=(Group(layers=tuple(numbers.values()), window=None, own=own, shared=shared),),
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_factor=1 if is_latent else 2,
        tokens_per_block=int(spec.block_size),
        is_flat=True,
    )


def only_group(config: Any) -> Any:
    """Return the group of layers of a cache that has just one; ConfigError: it is not served."""
    groups = config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"The KV cache has {len(groups)} groups of layers; kvray serves vLLM with one. Start it"
            " with --disable-hybrid-kv-cache-manager, or leave --kv-transfer-config out."
        )
    spec = groups[0].kv_cache_spec
    alike = getattr(spec, "kv_cache_specs", None)
    kinds = {type(one).__name__ for one in (alike.values() if alike else [spec])}
    if other := sorted(kinds - _KEPT):
        raise ConfigError(
            f"The KV cache is of {other[0]}, of which vLLM gives pages back while a request runs;"
            " leave --kv-transfer-config out."
        )
    if alike:
        raise ConfigError(
            "The model's layers have KV caches of different sizes or kinds; kvray serves models"
            " whose layers are alike, so leave --kv-transfer-config out."
        )
    # vLLM, too, switches its prefix cache off then; a connector is not told.
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            "The model's prompts are read in both directions, so the KV of a token depends on"
            " those that follow it, and none can be shared; leave --kv-transfer-config out."
        )
    return groups[0]


def _regions(
    kv_caches: dict[str, torch.Tensor], config: Any, numbers: dict[str, int]
) -> Iterator[Region]:
    """Yield the bytes of each layer's blocks, layers of one block that touch as one region."""
    page_bytes = int(config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    for placed in config.kv_cache_tensors:
        layers = [name for name in placed.layers if name in numbers]
        if len(layers) != len(placed.layers) or getattr(placed, "host_resident", False):
            raise ConfigError(
                f"vLLM keeps other caches beside that of {placed.layers[0]}; kvray serves models"
                " with one KV cache."
            )
        strides = [placed.block_stride, placed.layer_stride]
        nearest = min(strides) if len(layers) > 1 else placed.block_stride
        if not 0 < page_bytes <= nearest:
            raise ConfigError(
                f"A block has {page_bytes} bytes a layer and {nearest} to the next one; kvray"
                " serves blocks whose layers do not overlap, so choose another"
                " VLLM_KV_CACHE_LAYOUT."
            )
        storage = _storage(kv_caches, layers, placed)
        # Where kernels have smaller blocks, heads lie in each of those: `create_kv_cache_views`.
        first = kv_caches[layers[0]]
        view = tuple(zip(first.shape[1:], first.stride()[1:], strict=True))
        if placed.layer_stride == page_bytes:  # a block has its layers end to end
            yield _region(storage, config, placed, 0, [numbers[name] for name in layers], view)
            continue
        for index, name in enumerate(layers):
            yield _region(storage, config, placed, index, [numbers[name]], view)


def _region(
    storage: torch.Tensor,
    config: Any,
    placed: Any,
    index: int,
    layers: list[int],
    view: tuple[tuple[int, int], ...],
) -> Region:
    page_bytes = int(config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    start = placed.offset + index * placed.layer_stride
    pages = storage.as_strided(
        (config.num_blocks, page_bytes * len(layers)), (placed.block_stride, 1), start
    )
    steps = [
        LayerRange((layer,), place * page_bytes, (place + 1) * page_bytes)
        for place, layer in enumerate(layers)
    ]
    return Region(pages=pages, steps=tuple(steps), view=view)


def _storage(kv_caches: dict[str, torch.Tensor], layers: list[str], placed: Any) -> torch.Tensor:
    """Return the bytes that the tensors of `layers` share, once they are seen to lie as said."""
    missing = [name for name in layers if name not in kv_caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for {missing[0]}; kvray needs all of them.")
    first = kv_caches[layers[0]]
    storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    for index, name in enumerate(layers):
        tensor = kv_caches[name]
        said = storage.data_ptr() + placed.offset + index * placed.layer_stride
        if tensor.data_ptr() != said or storage.numel() < placed.size:
            raise ConfigError(
                f"The KV cache of {name} lies elsewhere than vLLM says; kvray serves vLLM 0.32 and"
                " what lays its cache out alike."
            )
    return storage
