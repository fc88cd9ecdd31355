"""Text to token ids and back: a checkpoint's own tokenizer, or bytes for weights that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

_FIRST_BYTE = 3  # 0 pads, 1 begins and 2 ends, as in most Llama vocabularies


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    end_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the ids."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte.

    Ids that are no byte show as private-use characters: equal texts come from equal ids alone.
    """

    end_ids: frozenset[int] = frozenset({2})

    def encode(self, text: str) -> list[int]:
        """Return one id per byte of the text's UTF-8 form."""
        return [_FIRST_BYTE + byte for byte in text.encode()]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text; bytes that are no UTF-8 come back as surrogates."""
        pieces = [
            bytes([token - _FIRST_BYTE])
            if _FIRST_BYTE <= token < _FIRST_BYTE + 256
            else chr(0xF0000 + token).encode()
            for token in token_ids
        ]
        return b"".join(pieces).decode(errors="surrogateescape")


class CheckpointTokenizer:
    """The tokenizer that a checkpoint brings, through transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.end_ids = frozenset(() if eos is None else (int(eos),))

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the special tokens that a chat template would add."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a .gguf file or of a checkpoint's directory.

    A directory without tokenizer files gets bytes: such are random weights made for a test.
    """
    from transformers import AutoTokenizer

    if path.is_file():
        return CheckpointTokenizer(
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        )
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return ByteTokenizer()
    return CheckpointTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))


def save_tokenizer(gguf: Path, directory: Path) -> None:
    """Write the tokenizer of a .gguf file in the form that checkpoints on disk have."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    ).save_pretrained(directory)
