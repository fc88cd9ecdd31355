"""Text to token ids and back: a checkpoint's own tokenizer, or bytes for weights without one."""

from pathlib import Path
from typing import Any, TypeAlias

from kvray.errors import ConfigError

_FIRST_BYTE = 3  # 0 pads, 1 begins and 2 ends, as in most Llama vocabularies


class ByteTokenizer:
    """One id per UTF-8 byte.

    Ids that are no byte show as private-use characters: equal texts come from equal ids alone.
    """

    end_ids: frozenset[int] = frozenset({2})

    def encode(self, text: str) -> list[int]:
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
        """Return the ids of `text`, without the special tokens of a chat template."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


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
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "The reference engine needs transformers: run pip install 'kvray[demo]'."
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
