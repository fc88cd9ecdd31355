"""Text to token ids and back: a checkpoint's own tokenizer, or bytes for weights without one."""

import re
from pathlib import Path
from typing import Any, TypeAlias

from kvray.errors import needs

_FIRST_BYTE = 3  # 0 pads, 1 begins and 2 ends, as in most Llama vocabularies
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTE_OF = {
    **{chr(byte): byte for byte in _SHOWN},
    **{chr(0x100 + at): byte for at, byte in enumerate(_HIDDEN)},
}
"""Character -> byte in vocabularies of GPT-2's kind, which write every byte as one that shows."""


class ByteTokenizer:
    """One id per UTF-8 byte.

    Ids that are no byte show as private-use characters: equal texts come from equal ids alone.
    """

    end_ids: frozenset[int] = frozenset({2})

    def encode(self, text: str) -> list[int]:
        """Return the ids; UnicodeError: a surrogate that stands for no byte, see `decode`."""
        return [_FIRST_BYTE + byte for byte in text.encode(errors="surrogateescape")]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text; bytes that are no UTF-8 come back as surrogates."""
        return b"".join(map(self.bytes_of, token_ids)).decode(errors="surrogateescape")

    def bytes_of(self, token: int) -> bytes:
        """Return what one token adds to a text's bytes."""
        is_byte = _FIRST_BYTE <= token < _FIRST_BYTE + 256
        return bytes([token - _FIRST_BYTE]) if is_byte else chr(0xF0000 + token).encode()


class CheckpointTokenizer:
    """The tokenizer that a checkpoint brings, through transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.end_ids = frozenset(() if eos is None else (int(eos),))
        self._is_byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the special tokens of a chat template."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def bytes_of(self, token: int) -> bytes:
        """Return what one token adds to a text's bytes; a special one adds nothing."""
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._tokenizer.all_special_ids:
            return b""
        if self._is_byte_level:
            is_shown = set(piece) <= _BYTE_OF.keys()
            return bytes(map(_BYTE_OF.__getitem__, piece)) if is_shown else piece.encode()
        if _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


Tokenizer: TypeAlias = ByteTokenizer | CheckpointTokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a .gguf file or a checkpoint; bytes for random weights."""
    files = ("tokenizer.json", "tokenizer.model")
    if path.is_dir() and not any((path / name).exists() for name in files):
        return ByteTokenizer()
    return CheckpointTokenizer(read("AutoTokenizer", path))


def read(auto_class: str, path: Path, **options: Any) -> Any:
    """Have a class of transformers read a .gguf file or a checkpoint's directory, in silence."""
    transformers = import_transformers()
    if path.is_file():
        from transformers import modeling_gguf_pytorch_utils as gguf

        gguf.tqdm = transformers.utils.logging.tqdm  # its own bar heeds no switch
        path, options["gguf_file"] = path.parent, path.name
    source = getattr(transformers, auto_class)
    return source.from_pretrained(path, local_files_only=True, **options)


def import_transformers() -> Any:
    """Return the package, its progress bars off; ConfigError if it is not installed."""
    with needs("demo"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    return transformers
