"""The tokens that stand for pictures, videos and sounds in a prompt, as a checkpoint names them.

The first cache manager shows only what C++ has of a request, which lacks pictures without digests.
Its tokens tell: media take the place of certain tokens, or of tokens beyond the vocabulary.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
