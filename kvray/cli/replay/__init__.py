"""`kvray replay`: how policies, or routers, would have served a trace of requests."""

from kvray.cli.replay.command import parse_sizes, replay

__all__ = ["parse_sizes", "replay"]
