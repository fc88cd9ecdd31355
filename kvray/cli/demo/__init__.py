"""`kvray demo`: two replicas of a real language model share prefixes, and a verdict."""

from kvray.cli.demo.command import demo

__all__ = ["demo"]
