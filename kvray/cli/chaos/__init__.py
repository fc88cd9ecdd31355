"""`kvray chaos`: several nodes on this machine serve while parts of them are ended or broken."""

from kvray.cli.chaos.command import chaos

__all__ = ["chaos"]
