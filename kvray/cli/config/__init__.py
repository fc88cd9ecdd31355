"""`kvray config`: every value with its source, the schema, and whether it fits this machine."""

from kvray.cli.config.command import config_app

__all__ = ["config_app"]
