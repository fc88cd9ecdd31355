"""Which parts of a block have the bytes of a rank, if engines of other sizes have stored it."""


def readable_ranks(rank: int, num_ranks: int, stored_by: int) -> range:
    """Return the ranks, among `stored_by`, whose bytes `rank` among `num_ranks` reads.

    One of the two numbers is a multiple of the other.
    """
    if stored_by < num_ranks:
        wide = rank * stored_by // num_ranks
        return range(wide, wide + 1)
    ratio = stored_by // num_ranks
    return range(rank * ratio, (rank + 1) * ratio)
