"""`kvray bench`: how fast the tier is, beside the bare work that nothing could save."""

from kvray.cli.bench.command import bench

__all__ = ["bench"]
