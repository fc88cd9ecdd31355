"""Which shards have which parts: one object for all blocks that are held alike."""

from collections.abc import Iterator


class Incarnation:
    """What one shard says that it has, from one full announcement to the next."""

    __slots__ = ("is_ended", "is_kept", "is_silent", "numbers", "shard")

    def __init__(self, shard: str) -> None:
        """Begin; nothing is held yet."""
        self.shard = shard
        self.is_ended = False
        self.is_kept = False
        """Ended, but its entries stay until the shard has said anew what it has."""
        self.is_silent = False
        self.numbers: set[int] = set()
        """Of the holdings that name it."""


Masks = dict[Incarnation, int]
"""Whose, and which parts: bit n for part n. Not changed once it is a holding's."""


class Holding:
    """Who has which parts of certain blocks; those that are held alike share it."""

    __slots__ = ("live", "masks", "num_keys", "seen")

    def __init__(self, masks: Masks) -> None:
        """Stand for `masks`."""
        self.masks = masks
        self.num_keys = 0
        self.seen = -1
        self.live: dict[str, int] = {}


class Holdings:
    """All holdings that some key has, by number; 0 is nobody's."""

    def __init__(self) -> None:
        """Start empty."""
        self._numbers: dict[frozenset[tuple[Incarnation, int]], int] = {}
        self._holdings: list[Holding] = [Holding({})]
        self._free: list[int] = []
        self._changes = 0

    def __len__(self) -> int:
        """Return the first number that was never given."""
        return len(self._holdings)

    def __iter__(self) -> Iterator[Holding]:
        return (self._holdings[number] for number in self._numbers.values())

    def masks(self, number: int) -> Masks:
        """Return who has what, those included who have ended."""
        return self._holdings[number].masks

    def number_of(self, masks: Masks) -> int:
        """Return the number of the holding that stands for `masks`, which it keeps."""
        if not masks:
            return 0
        name = frozenset(masks.items())
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._holdings)
            self._holdings[number : number + 1] = [Holding(masks)]
            self._numbers[name] = number
            for incarnation in masks:
                incarnation.numbers.add(number)
        return number

    def count(self, number: int, change: int) -> None:
        """Note that so many keys more, or fewer, are held so; the last one ends the holding."""
        holding = self._holdings[number]
        if not number:
            return
        holding.num_keys += change
        if not holding.num_keys:
            del self._numbers[frozenset(holding.masks.items())]
            for incarnation in holding.masks:
                incarnation.numbers.discard(number)
            self._free.append(number)

    def shards_changed(self) -> None:
        """Note that somebody ended, fell silent or was heard again."""
        self._changes += 1

    def live(self, number: int) -> dict[str, int]:
        """Return shard -> mask of its parts, of those that can be asked for them."""
        holding = self._holdings[number]
        if holding.seen != self._changes:
            holding.seen = self._changes
            holding.live = {
                one.shard: mask
                for one, mask in holding.masks.items()
                if not one.is_ended and not one.is_silent
            }
        return holding.live
