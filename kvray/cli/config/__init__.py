"""`kvray config`: every value with its source, and the schema."""

from kvray.cli.config.command import config_app

__all__ = ["config_app"]
