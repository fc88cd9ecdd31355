"""`kvray dashboard serve`: the tier on a page for browsers."""

from kvray.cli.page.command import serve

__all__ = ["serve"]
