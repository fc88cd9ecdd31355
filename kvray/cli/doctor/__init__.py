"""`kvray doctor`: faults between an engine, its node and the tier, each with its fix."""

from kvray.cli.doctor.command import doctor

__all__ = ["doctor"]
