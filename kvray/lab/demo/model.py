"""The demo's model: found or downloaded first, unpacked and read later."""

from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from kvray.errors import ConfigError
from kvray.lab.reference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from kvray.lab.reference.weights import find_weights

_SMOLLM2 = "smollm2"


def is_tiny(model: str) -> bool:
    """Return whether a model is random weights, which exist in memory only."""
    return model.partition(":")[0] == "tiny"


def fetch_model(model: str) -> None:
    """Make sure that the model is on this machine.

    Raises:
        ConfigError: there is no such model, its download failed, or a package is missing.
    """
    missing = [name for name in ("accelerate", "gguf", "transformers") if not find_spec(name)]
    if missing:
        raise ConfigError(
            f"The demo's engines need {', '.join(missing)}; run `pip install 'kvray[demo]'`."
        )
    if model == _SMOLLM2:
        find_weights()  # shows a bar if it has to download them
    elif not is_tiny(model) and not Path(model).expanduser().exists():
        raise ConfigError(
            f"There is no model at {model}; give smollm2, tiny, or the path of a Llama-family"
            " checkpoint (a directory or a .gguf file)."
        )


def read_model(model: str, console: Console) -> tuple[str, Tokenizer]:
    """Return the name or path that engines load, and the tokenizer.

    Raises:
        ConfigError: the model cannot be read, or cannot be unpacked into the cache.
    """
    if is_tiny(model):
        return model, ByteTokenizer()
    with console.status("Reading the model"):
        path = Path(model).expanduser().absolute()
        if model == _SMOLLM2:
            from kvray.lab.reference.checkpoint import find_smollm2  # imports torch

            path = find_smollm2()
        try:
            return str(path), load_tokenizer(path)
        except (OSError, ValueError) as error:  # transformers raises both
            raise ConfigError(f"The tokenizer at {path} cannot be read: {error}") from None
