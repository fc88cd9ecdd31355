"""Policies: which blocks of a tier go first."""

from kvray.store.policy.gittins import Gittins
from kvray.store.policy.lru import LRU
from kvray.store.policy.policy import Policy, Use
from kvray.store.policy.s3fifo import S3FIFO

__all__ = ["LRU", "POLICIES", "S3FIFO", "Gittins", "Policy", "Use"]

POLICIES = {"gittins": Gittins, "lru": LRU, "s3fifo": S3FIFO}
"""By name; each is made of a number of slots."""
