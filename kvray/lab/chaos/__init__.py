"""Chaos: several nodes on this machine serve while parts of them are ended or broken."""
