"""The command `kvray`."""

from kvray.cli.app import main

__all__ = ["main"]
