"""`kvray doctor`: faults between an engine, its node and the tier, each with its fix."""
