"""`kvray pin`: prompts that must stay in memory for a time."""

from kvray.cli.pin.command import pin

__all__ = ["pin"]
