"""What besides its tokens distinguishes a request: salt, LoRA adapter and media; or a bypass.

Whatever enters the keys and values of a request beside its tokens either enters its keys or makes
it bypass the cache. Fields are those of TensorRT-LLM's `LlmRequest`: its bindings, and from 1.1 on
the Python attributes beside them (`py_...`); versions lack some of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvray.connector.fields import field_of, number_of
from kvray.connector.media import MEDIA_FIELDS, media_items
from kvray.keys import MediaItem
from kvray.tenant import TenantSalts

FingerprintAdapter = Callable[[int, str], bytes | None]
"""From an adapter's task number and path to what tells it from others, as `Adapters` does."""

_UNNAMED = (
    "prompt_embedding_table",
    "py_prompt_embedding_table",
    "prompt_vocab_size",
    "input_token_extra_ids",
    "position_ids",
    "token_type_ids",
    "language_adapter_uid",
    "py_encoder_output",
    "py_encoder_input_features",
)
"""Prompt tuning, positions other than 0, 1, 2, ..., encoders: nothing that has a name of its own.

The engine sets `position_ids` where one prompt is spread over ranks, and nowhere else.
"""
_ENCODER = ("encoder_tokens", "encoder_input_features", "cross_attention_mask")
"""Asked of the Python attributes alone: a binding may raise where a request has no encoder."""
_SALTS = ("cache_salt", "cache_salt_id")
_FIELDS = (*_UNNAMED, *MEDIA_FIELDS, *_SALTS, "lora_task_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What enters the keys of a request beside its tokens."""

    salt: str | int | None
    lora: bytes | None
    media: tuple[MediaItem, ...]
    tenant_id: int = 0
    """What an arena knows the request's tenant by; 0: it has none."""


_PLAIN = Identity(salt=None, lora=None, media=())


def identify(request: Any, fingerprint_adapter: FingerprintAdapter) -> Identity | None:
    """Return the identity of an engine's request.

    None: something enters its KV that cannot be told from here (an adapter without a path, or one
    whose files have changed; media without digests; prompt embeddings; an encoder's output): such
    a request bypasses the cache.

    Raises:
        ConfigError: a media digest of unknown form, or an adapter that cannot be read.
    """
    if _has_encoder(request):
        return None
    found = [name for name in _FIELDS if getattr(request, name, None) is not None]
    if not found:
        return _PLAIN  # most requests; the rest need not be as fast
    fields = {name: value for name in found if _is_set(value := field_of(request, name))}
    if any(name in fields for name in _UNNAMED):
        return None
    media = media_items(fields, prompt_len=number_of(request, "prompt_len", 2**31))
    if media is None:
        return None
    lora = None
    if "lora_task_id" in fields:
        path = field_of(request, "py_lora_path")
        lora = fingerprint_adapter(int(fields["lora_task_id"]), str(path)) if path else None
        if lora is None:
            return None
    # The text says more than its number, which is a hash of it.
    salt = next((fields[name] for name in _SALTS if name in fields), None)
    return Identity(salt=salt, lora=lora, media=media)


def keep_apart(identity: Identity, tenants: TenantSalts) -> Identity | None:
    """Return `identity` with the salt of its tenant; None: the request names none.

    Such a request would get a salt that no other has. What it stores nobody could find, so it
    bypasses the cache instead.
    """
    derived = tenants.derive(identity.salt)
    if derived is None:
        return None
    return replace(identity, salt=derived.salt, tenant_id=derived.tenant_id)


def _has_encoder(request: Any) -> bool:
    own = getattr(request, "__dict__", None)
    if own and any(_is_set(own.get(name)) for name in _ENCODER):
        return True
    encoder_output_len = getattr(request, "try_get_encoder_output_len", None)
    return encoder_output_len is not None and isinstance(encoder_output_len(), int)


def _is_set(value: Any) -> bool:
    """Return whether there is a value; some versions say that there is none by an empty list."""
    return value is not None and not (isinstance(value, (list, tuple, dict)) and not value)
