"""The lookup's partitions: which of them is told of a block, and which is asked; pure.

All blocks of a chain have the number of its first key (`head_number`), so one partition has them
all and a request asks that one.
"""

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from kvray.identity.block import BlockKey, head_number

Array = npt.NDArray[Any]


def partition_of(first_key: BlockKey, num_partitions: int) -> int:
    """Return the partition to ask for the blocks of a chain that begins with `first_key`."""
    return head_number(first_key) % num_partitions


def shares(heads: Array, num_partitions: int) -> Iterator[Array | None]:
    """Yield for each partition which blocks it is told of: a mask, or None for all of them.

    `heads` are the numbers of their chains. A node that does not have the start of a chain does not
    know its number (0): all partitions are told of the block, so that a query finds it at any.
    """
    if num_partitions == 1:
        yield None
        return
    is_for_all, owners = heads == 0, heads % num_partitions
    for partition in range(num_partitions):
        yield is_for_all | (owners == partition)
