"""What tells one of vLLM's requests from another: salt, tenant, adapter and media; or a bypass.

Whatever enters the keys and values of a request beside its tokens enters its keys, or makes it
bypass the cache. Source: `vllm/v1/request.py`, and `generate_block_hash_extra_keys` in
`vllm/v1/core/kv_cache_utils.py`, of vLLM 0.32. Set-ups of vLLM that kvray would serve wrongly are
refused at the start.
"""

from collections.abc import Iterator
from typing import Any

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

    def read(self, request: Any, number: int, num_computed: int) -> Prompt | None:
        """Return a request as the leader knows it; None: it bypasses the cache.

        ConfigError: its adapter cannot be read.
        """
        identity = self._identify(request)
        if identity is None:
            return None
        tokens = list(request.all_token_ids)  # one that was preempted has generated some
        return Prompt(
            request_id=number,
            tokens=tokens,
            prompt_len=len(tokens),
            num_computed=num_computed,
            identity=identity,
            is_unread=bool(request.skip_reading_prefix_cache),  # such as for prompt logprobs
        )

    def _identify(self, request: Any) -> Identity | None:
        media = _media_items(request.mm_features)
        if media is None or _has_more_than_tokens(request):
            return None
        lora: bytes | None = None
        if request.lora_request is not None:
            asked = request.lora_request
            lora = self._adapters.fingerprint(asked.lora_int_id, asked.lora_path)
            if lora is None or asked.load_inplace:
                return None
        return Identity(salt=request.cache_salt, lora=lora, media=media)


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
    role = field_of(vllm_config.kv_transfer_config, "kv_role")
    yield role != "kv_both", f"kv_role is {role!r}; kvray loads and saves, so set it to kv_both."
