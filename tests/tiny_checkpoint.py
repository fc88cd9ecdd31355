"""Checkpoints on disk, for tests that need files to fingerprint."""

from pathlib import Path

from kvray.reference.model import make_tiny_causal_lm


def write_tiny_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    make_tiny_causal_lm(seed).save_pretrained(directory)
    return directory
