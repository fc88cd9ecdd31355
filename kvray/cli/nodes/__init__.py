"""The commands for a node that comes or goes."""

from kvray.cli.nodes.drain import drain
from kvray.cli.nodes.warm import warm

__all__ = ["drain", "warm"]
