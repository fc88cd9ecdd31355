"""Which parts of a block have the bytes of a rank, if engines of other sizes have stored it."""

from collections.abc import Sequence


def readable_ranks(rank: int, num_ranks: int, stored_by: int) -> range:
    """Return the ranks, among `stored_by`, whose bytes `rank` among `num_ranks` reads.

    One of the two numbers is a multiple of the other.
    """
    if stored_by < num_ranks:
        wide = rank * stored_by // num_ranks
        return range(wide, wide + 1)
    ratio = stored_by // num_ranks
    return range(rank * ratio, (rank + 1) * ratio)


def readable_parts(parts: Sequence[int], num_ranks: int, stored_by: int) -> list[int]:
    """Return the parts, of a block of `stored_by` ranks, with the bytes of a rank's own `parts`.

    Parts are numbered layer group by layer group, and in each by rank.
    """
    return [
        part // num_ranks * stored_by + other
        for part in parts
        for other in readable_ranks(part % num_ranks, num_ranks, stored_by)
    ]
