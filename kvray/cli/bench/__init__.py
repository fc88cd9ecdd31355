"""`kvray bench`: one command for each thing that is measured."""

from kvray.cli.bench.commands import bench

__all__ = ["bench"]
