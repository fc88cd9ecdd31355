"""What an engine says of itself, and its checkpoint of its KV cache.

Each connector reads the settings from its own engine, which names them in its own way, and
differently from version to version. Arguments are pydantic models or dataclasses, requests may be
C++ objects with Python attributes beside them. Settings are texts or enumerations. Every field is
read with a default, and none is ever written.

A checkpoint has `config.json`, as Hugging Face writes it, and `hf_quant_config.json`, as ModelOpt
does. One that is not there or cannot be read says nothing; the engine will complain of it.

Media tokens stand for pictures, videos and sounds in a prompt. The first cache manager shows only
what C++ has of a request, which lacks pictures without digests. Its tokens tell: media take the
place of certain tokens, or of tokens beyond the vocabulary.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import SimpleNamespace
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

    `changes` are fields that the engine replaces (`model_kwargs`, from 1.2 on).
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


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine's settings that decide what its blocks are and which of them may be shared."""

    model: str  # the checkpoint's path, or its name on a hub
    tokens_per_block: int
    num_ranks: int
    rank: int
    block_reuse: bool
    has_writes_aside: bool = False
    """What a pass saves is to be read by its end. Pages are written outside of the passes, or by
    other streams than that of the layers, as with copies of partly reused blocks and what other
    servers send; or they are taken away."""
    refills_inputs: bool = False
    """The engine fills a pass's inputs again before a device that stalls has read them: its stream
    is not to wait for copies before a pass."""
    owns_partial_blocks: bool = False
    """A page of which a request reuses the first tokens is its own, and was filled on the stream
    that its layers run on: a block may be loaded over it."""
    quantization: str  # weight and KV quantisation as the engine names them, as one text
    overrides: str
    """What changes the checkpoint's own configuration or weights, as one text."""
    attention_backend: str
    engine: str
    ranks_per_node: int = 0  # how many ranks a node has; 0: not said, and all are on one
    attention_dp: bool = False  # each rank has a whole KV cache for requests of its own
    is_compiled: bool  # the model is compiled by torch: hooks on its layers may not fire
    windows: tuple[int, ...] = ()
    """The different attention windows in the engine's settings, in tokens, ascending."""
    adapters: str
    """How the engine reads LoRA adapters, as one text; enters the keys of requests with one."""
    checkpoint: CheckpointConfig
    is_sparse: bool = False
    """Attention picks its tokens by an index that is cached beside keys and values."""
    spread_setting: str
    """The setting for how many ranks a node has."""
    asks_again: bool = False
    """The engine may be made to ask again later, and schedules other requests meanwhile."""
    holds_loads: bool = False
    """Its ranks copy and check blocks before they are promised, so the leader checks none."""
    drafts_tokens: bool = False
    """The engine drafts tokens and takes back the pages of those it rejects, without a word; so a
    page that was reported for an answer may belong to others by now."""
    reuses_passed: bool = False
    """The engine's own prefix cache takes in pages that a window passes before they are written:
    those of a prompt's first chunk that a promise goes beyond."""
    finds_parts: bool = False
    """The engine reuses the first tokens of a block that goes on otherwise."""
    reuses_unwritten: bool = False
    """The engine takes all blocks of a prompt for computed that was cancelled, or failed, on its
    way: its own prefix cache may have pages that nobody wrote."""
    weights_from: str = ""
    """What gives weights that the checkpoint's files may not be; empty: these are."""
    weights_may_change: bool
    """The engine is set up to have its weights replaced while it runs."""
    takes_offers_later: bool
    """The engine may come back for an offer after passes, until it cancels it."""
    served_name: str = ""
    """What clients call the model, if the engine says."""

    @property
    def shown_name(self) -> str:
        """What people are to read of the model: what is served, or else the checkpoint's name."""
        hub = re.search("models--([^/]+)/snapshots/", self.model)
        is_path = self.model.startswith(("/", ".", "~")) or Path(self.model).exists()
        name = PurePath(self.model).name if is_path else self.model
        name = self.served_name or (hub[1].replace("--", "/") if hub else name)
        return re.sub("[^ -~]", "?", name)[:100]

    @cached_property
    def num_parts_ranks(self) -> int:
        """Ranks that each hold a share of every request's KV; with attention DP there is one."""
        return 1 if self.attention_dp else self.num_ranks

    @cached_property
    def part_rank(self) -> int:
        """This rank among them."""
        return 0 if self.attention_dp else self.rank

    @cached_property
    def is_spread(self) -> bool:
        """Whether, by `ranks_per_node`, ranks that share a request are on several nodes."""
        return not self.attention_dp and 0 < self.ranks_per_node < self.num_ranks


_NO_FIELD = "kvray_asks_for_no_such_field"


def field_of(source: Any, name: str) -> Any:
    """Return a field of an engine's object; None if it is not there.

    A value that has every attribute one asks for was made up by the asking: it is no value.
    """
    value = getattr(source, name, None)
    return None if value is None or hasattr(value, _NO_FIELD) else value


def number_of(source: Any, name: str, default: int) -> int:
    """Return a whole number, `default` where there is none."""
    value = field_of(source, name)
    return value if isinstance(value, int) else default


def are_whole(values: Any) -> bool:
    """Whether `values` is a whole number, or lists of such, of lists and so on."""
    if isinstance(values, list | tuple):
        return all(map(are_whole, values))
    return type(values) is int


def text_of(source: Any, name: str) -> str:
    """Return a text, or the name of an enumeration's member; empty where there is neither."""
    value = field_of(source, name)
    if not isinstance(value, str):
        value = getattr(value, "name", "")
    # Some enumerations are texts whose `str` has the name of their class in it.
    return str.__str__(value) if isinstance(value, str) else ""


def release_of(version: str) -> str:
    """Return what of an engine's version enters the namespace: a release's major and minor number.

    What comes before a release has all of its version: a candidate may have faults in its bytes
    that the next one mends.
    """
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*(\+.*)?", version)
    return release[1] if release else version


def canonical_text(source: Any, names: Iterable[str]) -> str:
    """Return the named fields that are set as one text, see `to_text`."""
    values = {name: field_of(source, name) for name in names}
    return to_text({name: value for name, value in values.items() if value is not None})


def to_text(value: Any) -> str:
    """Return `value` as JSON that is equal for equal values in every process."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it.

    Of an object that is no record only its type's name is kept: its own text may hold its
    address, which would give every process a namespace of its own.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (Integral, Real)):
        return int(value) if isinstance(value, Integral) else float(value)  # numpy's
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(one) for one in value), key=json.dumps)
    names = _record_fields(value)
    if names is None:
        kind = value if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return {name: _plain(getattr(value, name, None)) for name in names}


def _record_fields(value: Any) -> list[str] | None:
    """Return the names of a record's fields; None for any other object."""
    declared = getattr(type(value), "model_fields", None)  # pydantic's
    if isinstance(declared, Mapping):
        return list(declared)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(vars(value)) if isinstance(value, SimpleNamespace) else None
