"""What a checkpoint's own configuration says of its KV cache.

Read from `config.json`, as Hugging Face writes it, and `hf_quant_config.json`, as ModelOpt does.
A configuration that is not there or cannot be read says nothing; the engine will complain of it.

Media tokens stand for pictures, videos and sounds in a prompt. The first cache manager shows only
what C++ has of a request, which lacks pictures without digests. Its tokens tell: media take the
place of certain tokens, or of tokens beyond the vocabulary.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvray.identity.keys import pack_tokens

_KINDS = {
    "images": ("vision", "visual", "image", "img"),
    "videos": ("video",),
    "sounds": ("audio", "speech"),
}
_WORD = re.compile(r"[a-z]+")
_TOKEN = re.compile(r"_token_(id|index)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """Of a model that takes media."""

    ids: frozenset[int]
    """Empty: the checkpoint does not name those of every kind that it takes."""
    vocab_size: int  # tokens from here on have no embedding of their own; 0: not said

    def may_be_in(self, tokens: Sequence[int]) -> bool:
        """Whether media may stand in the prompt."""
        if not self.ids or not self.vocab_size:
            return True
        packed = pack_tokens(tokens)  # numpy looks through it in a tenth of Python's time
        if packed.size and not 0 <= packed.min() <= packed.max() < self.vocab_size:
            return True
        return any((packed == number).any() for number in self.ids)


def read_media_tokens(config: Mapping[str, Any], vocab_size: int | None) -> MediaTokens | None:
    """Return the tokens that stand for media in prompts; None: the model takes none.

    `config` is the checkpoint's, `vocab_size` that of the part that has the KV cache.

    Source: `fuse_input_embeds` puts media where the model's configuration has its placeholders,
    `image_token_id` and the like, or at tokens beyond the vocabulary.
    """
    taken: set[str] = set()
    named: dict[str, set[int]] = {}
    for name, value in _fields(config):
        kind = _kind(name)
        if kind is not None and _TOKEN.search(name) and isinstance(value, int):
            named.setdefault(kind, set()).add(value)
        elif kind is not None and value and isinstance(value, Mapping | str):
            taken.add(kind)  # an encoder, or what it is called; sizes and rates say nothing
    if not taken and not named:
        return None
    are_all_named = taken <= named.keys()
    ids = [number for numbers in named.values() for number in numbers] if are_all_named else ()
    return MediaTokens(ids=frozenset(ids), vocab_size=vocab_size or 0)


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all fields, those of parts after the part itself."""
    for name, value in config.items():
        yield str(name).lower(), value
        if isinstance(value, Mapping):
            yield from _fields(value)


def _kind(name: str) -> str | None:
    words = set(_WORD.findall(name))
    return next((kind for kind, of_kind in _KINDS.items() if words.intersection(of_kind)), None)


Config = Mapping[str, Any]

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CONFIG_BYTES_MAX = 2**26
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Where the configurations of multimodal models keep that of the part that has the KV cache."""
_RECURRENT_TYPES = {
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "plamo2", "qwen3_5", "qwen3_5_moe",
    "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2",
}  # fmt: skip
_RECURRENT_FIELDS = ("hybrid_override_pattern", "linear_attn_config", "full_attention_interval")
_RECURRENT_PREFIXES = ("mamba_", "ssm_")
_LAYER_TYPES = ("layer_types", "layers_block_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What a checkpoint's configuration says of its KV cache; None stands for what is not said."""

    num_layers: int | None = None  # layers with attention
    is_mla: bool | None = None  # keys and values are one latent vector, the same on all ranks
    num_kv_heads: int | None = None  # of each layer, on all ranks together; 0: layers differ
    latent_elems: int | None = None
    """Elements of the latent vector of a token in one layer; None also if there is none."""
    recurrent: str = ""
    """The field that tells of layers with a state instead of a KV cache; empty: none does."""
    is_encoder_decoder: bool = False
    has_index_cache: bool = False
    """Attention picks its tokens by an index, which is a cache of its own."""
    has_fp4_cache: bool = False
    media_tokens: MediaTokens | None = None
    """What stands for pictures and sounds in prompts; None also if the model takes none."""


def find_checkpoint(model: str, revision: str | None) -> str:
    """Return where a checkpoint lies that is named as on Hugging Face's hub; else `model` itself.

    Engines fetch such a checkpoint into the hub's cache before they make a connector, and leave the
    name in their arguments. A name may mean another revision by now: what is found tells
    the kind of a model, not which weights it has.
    """
    if not _HUB_NAME.fullmatch(model) or Path(model).exists():
        return model
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return model
    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return str(Path(found).parent) if isinstance(found, str) else model


def read_checkpoint(model: str, changes: Config | None = None) -> CheckpointConfig:
    """Return what the checkpoint in the directory `model` says of its KV cache.

    `changes` are fields that the engine was told to replace (`model_kwargs`, from 1.2 on).
    """
    config = _read(Path(model) / "config.json") if model else None
    if config is None:
        return CheckpointConfig()
    config = _replaced(config, changes or {})
    language = _language_model(config)
    rank = language.get("kv_lora_rank")
    is_mla = isinstance(rank, int) and rank > 0
    return CheckpointConfig(
        num_layers=_attention_layers(language),
        is_mla=is_mla,
        num_kv_heads=_num_kv_heads(language),
        latent_elems=_latent_elems(language),
        recurrent=next((found for one in (config, language) for found in _recurrent(one)), ""),
        is_encoder_decoder=any(one.get("is_encoder_decoder") is True for one in (config, language)),
        has_index_cache=_whole(language, "index_topk") is not None,
        has_fp4_cache=_has_fp4_cache(config, _read(Path(model) / "hf_quant_config.json") or {}),
        media_tokens=read_media_tokens(
            config, _whole(language, "vocab_size") or _whole(config, "vocab_size")
        ),
    )


def _read(path: Path) -> Config | None:
    try:
        with path.open("rb") as opened:
            config = json.loads(opened.read(_CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, Mapping) else None


def _replaced(config: Config, changes: Config) -> Config:
    replaced = dict(config)
    for name, value in changes.items():
        part = replaced.get(name)
        are_parts = isinstance(part, Mapping) and isinstance(value, Mapping)
        replaced[name] = _replaced(cast(Config, part), value) if are_parts else value
    return replaced


def _language_model(config: Config) -> Config:
    for name in _LANGUAGE_MODELS:
        part = config.get(name)
        if isinstance(part, Mapping):
            inner = _language_model(part)
            if "num_hidden_layers" in inner:
                return inner
    return config


def _attention_layers(config: Config) -> int | None:
    """Return how many layers have attention; `block_configs` is of Nemotron's search."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list):
        return _whole(config, "num_hidden_layers")
    attention = [block.get("attention") for block in blocks if isinstance(block, Mapping)]
    return sum(isinstance(one, Mapping) and not one.get("no_op") for one in attention)


def _num_kv_heads(config: Config) -> int | None:
    """Return the KV heads of a layer; lists, and `block_configs`, have a number for each."""
    if isinstance(config.get("num_key_value_heads"), list) or "block_configs" in config:
        return 0
    return _whole(config, "num_key_value_heads")


def _latent_elems(config: Config) -> int | None:
    latent, turned = _whole(config, "kv_lora_rank"), _whole(config, "qk_rope_head_dim")
    return latent + turned if latent and turned else None


def _recurrent(config: Config) -> Iterator[str]:
    if config.get("model_type") in _RECURRENT_TYPES:
        yield "model_type"
    for name, value in config.items():
        is_named = name in _RECURRENT_FIELDS or name.startswith(_RECURRENT_PREFIXES)
        if is_named and value:
            yield name
    for name in _LAYER_TYPES:
        types = config.get(name)
        if isinstance(types, list) and not all(_is_attention(one) for one in types):
            yield name


def _is_attention(layer_type: Any) -> bool:
    name = str(layer_type)
    return name.endswith("attention") and not name.startswith("linear")


def _has_fp4_cache(config: Config, quantization: Config) -> bool:
    parts = [quantization.get("quantization"), config.get("quantization_config")]
    for part in parts:
        if isinstance(part, Mapping):
            scheme = part.get("kv_cache_scheme")
            bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
            if bits == 4 or "FP4" in str(part.get("kv_cache_quant_algo")).upper():
                return True
    return False


def _whole(config: Config, name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
