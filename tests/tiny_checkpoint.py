"""Checkpoints on disk, for tests that need files to fingerprint."""

from pathlib import Path

from kvray.reference.checkpoint import save_checkpoint
from kvray.reference.model import TINY_CONFIG, make_random_weights


def write_tiny_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    save_checkpoint(TINY_CONFIG, make_random_weights(seed), directory)
    return directory
