"""Checks values that engines and other shards send."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, BlockKey, split_keys

T = TypeVar("T")

Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Name = Annotated[
    str,
    Field(
        strict=True,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00-\x1f\x7f-\x9f\x{2028}\x{2029}\x{202a}-\x{202e}\x{2066}-\x{2069}]*$",
    ),
]
"""Of a replica or a counter: logs, terminals and metrics get it as it is, so it is one line."""
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


def checked(kind: TypeAdapter[T], value: Any, name: str) -> T:
    """Return `value`, with tuples for lists; ConfigError if it is not of that kind."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(one) for one in (name, *first["loc"]))
        raise ConfigError(
            f"{place} cannot be {first['input']!r:.40}: {first['msg']}; engine and shard differ."
        ) from None


def keys_of(keys: object, *, keys_max: int | None = None) -> Sequence[BlockKey]:
    """Return the keys that lie end to end in `keys`; ConfigError if they are none, or too many."""
    if not isinstance(keys, bytes) or not keys or len(keys) % KEY_BYTES:
        raise ConfigError(f"keys are bytes, {KEY_BYTES} for each block and at least one.")
    if keys_max is not None and len(keys) > keys_max * KEY_BYTES:
        raise ConfigError(f"{len(keys) // KEY_BYTES} keys are too many; at most {keys_max}.")
    return split_keys(keys)
