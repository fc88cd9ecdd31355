"""Sets of holders: one object for all blocks with the same holders."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Incarnation:
    """The announced blocks of one shard, from one full announcement to the next."""

    shard: str
    is_ended: bool = False
    is_kept: bool = False
    """It has ended, but its entries stay until the shard has announced everything again."""
    is_silent: bool = False
    numbers: set[int] = field(default_factory=set)
    """Numbers of the holdings that name it."""


Masks = dict[Incarnation, int]
"""Incarnation -> its parts, bit n for part n. Never changed once a holding has it."""


@dataclass(slots=True, eq=False)
class Holding:
    """The holders of some blocks and their parts; blocks with the same holders share it."""

    masks: Masks
    num_keys: int = 0


class Holdings:
    """All holdings that some key has, by number; 0 stands for no holders."""

    def __init__(self) -> None:
        self._numbers: dict[frozenset[tuple[Incarnation, int]], int] = {}
        self._holdings: list[Holding] = [Holding({})]
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return the first unused number."""
        return len(self._holdings)

    def __iter__(self) -> Iterator[Holding]:
        return (self._holdings[number] for number in self._numbers.values())

    def masks(self, number: int) -> Masks:
        """Return the holders, ended ones included."""
        return self._holdings[number].masks

    def number_of(self, masks: Masks) -> int:
        """Return the number of the holding for `masks`, which keeps them."""
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
        """Add to the number of keys with this holding; at 0 the holding ends."""
        if not number:
            return
        holding = self._holdings[number]
        holding.num_keys += change
        if not holding.num_keys:
            del self._numbers[frozenset(holding.masks.items())]
            for incarnation in holding.masks:
                incarnation.numbers.discard(number)
            self._free.append(number)

    def live(self, number: int) -> dict[str, int]:
        """Return shard -> mask of its parts, of the shards that can be asked."""
        masks = self._holdings[number].masks
        return {
            one.shard: mask for one, mask in masks.items() if not one.is_ended and not one.is_silent
        }
