"""Starts, changes and ends a tier, in the process of a command; owns no state of its own."""
