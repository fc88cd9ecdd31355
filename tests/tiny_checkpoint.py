"""Checkpoints on disk, for tests that need files to fingerprint or to read."""

import json
from pathlib import Path

from kvray.reference.model import TINY_CONFIG, Config, Weights, make_random_weights


def save_checkpoint(config: Config, weights: Weights, directory: Path) -> None:
    """Write a directory that transformers reads, too."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_tiny_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    save_checkpoint(TINY_CONFIG, make_random_weights(seed), directory)
    return directory
