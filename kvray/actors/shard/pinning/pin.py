"""Pins: prompts whose blocks must stay until a time, and which of two reports of a pin counts.

Every shard has every pin. The later one of a name counts, and a removed pin is remembered as one
without blocks, so shards that tell each other theirs agree whatever they missed. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvray.config import format_size
from kvray.errors import CapacityError, ConfigError
from kvray.identity.block import KEY_BYTES

PINS_MAX = 256
KEYS_MAX = 2**17
"""Blocks of all pins together."""
NAME_MAX = 80
_STEP_S = 1e-3
"""A change is later than what it changes, whatever the clocks say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A prompt that must stay; times are seconds since 1970."""

    name: str
    owner: str
    made_at: float
    until: float
    num_tokens: int
    block_bytes: int
    """Bytes of all parts of a block."""
    num_parts: int
    keys: bytes
    """Of its blocks in prefix order, 32 bytes each; empty: the pin was removed."""

    @property
    def num_blocks(self) -> int:
        """How many blocks it has."""
        return len(self.keys) // KEY_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return self.num_blocks * self.block_bytes

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Pin":
        """Return the pin of such values from a file; ValueError: they are none."""
        kinds = {"name": str, "owner": str, "keys": bytes}
        whole = {"num_tokens": int, "block_bytes": int, "num_parts": int}
        times = {"made_at": float, "until": float}
        for name, kind in {**kinds, **whole, **times}.items():
            if type(values.get(name)) is not kind:
                raise ValueError(f"{name} of a pin is no {kind.__name__}")
        pin = cls(**values)
        if min(pin.num_tokens, pin.block_bytes, pin.num_parts) < 0 or len(pin.keys) % KEY_BYTES:
            raise ValueError("a pin's numbers make no sense")
        return pin


class Pins:
    """The pins that one shard knows."""

    def __init__(self) -> None:
        self._by_name: dict[str, Pin] = {}

    def take(self, pins: Iterable[Pin], *, now: float) -> bool:
        """Take over those that count, and forget what has ended; return whether that was any."""
        before = dict(self._by_name)
        self._by_name = {name: pin for name, pin in before.items() if pin.until > now}
        for pin in pins:
            known = self._by_name.get(pin.name)
            is_later = known is None or (pin.made_at, not pin.keys) > (
                known.made_at,
                not known.keys,
            )
            if is_later and pin.until > now and self._has_room(pin, known):
                self._by_name[pin.name] = pin
        return self._by_name != before

    def live(self, now: float) -> list[Pin]:
        """Return the pins that hold now, the oldest first."""
        found = [pin for pin in self._by_name.values() if pin.keys and pin.until > now]
        return sorted(found, key=lambda pin: (pin.made_at, pin.name))

    def beyond(self, known: Mapping[str, float]) -> list[Pin]:
        """Return what counts more than what is `known`: name -> `made_at`."""
        pins = self._by_name.values()
        return [pin for pin in pins if pin.made_at > known.get(pin.name, float("-inf"))]

    def known(self) -> dict[str, float]:
        """Return name -> `made_at`, for `beyond` of another shard."""
        return {name: pin.made_at for name, pin in self._by_name.items()}

    def check(self, pin: Pin, *, now: float, bytes_max: int, owner_bytes_max: int) -> None:
        """Raise unless `pin` may be added, or may replace the one of its name.

        ConfigError: it is another owner's name. CapacityError: all pins, or those of its owner,
        would take more than they may.
        """
        known = self._by_name.get(pin.name)
        if known is not None and known.keys and known.owner != pin.owner:
            raise ConfigError(
                f"{pin.owner!r} cannot pin {pin.name!r}, which is a pin of {known.owner!r}; choose"
                " another --name, or remove it first."
            )
        if not self._has_room(pin, known):
            raise CapacityError(
                f"There are {len(self._by_name)} pins; a tier has at most {PINS_MAX}, with"
                f" {KEYS_MAX} blocks. Remove some."
            )
        others = [one for one in self.live(now) if one.name != pin.name]
        theirs = [one for one in others if one.owner == pin.owner]
        limits = (
            (bytes_max, others, "all pins", "pins.share"),
            (owner_bytes_max, theirs, f"the pins of {pin.owner!r}", "pins.owner_share"),
        )
        for most, pins, whose, setting in limits:
            used = sum(one.num_bytes for one in pins)
            if used + pin.num_bytes > most:
                raise CapacityError(
                    f"{pin.name!r} takes {format_size(pin.num_bytes)}, and of the"
                    f" {format_size(most)} that a node keeps for {whose} ({setting})"
                    f" {format_size(used)} are taken; remove a pin, or raise the limit."
                )

    def later_than_known(self, name: str, now: float) -> float:
        """Return a time for `made_at` that counts more than what is known of a name."""
        known = self._by_name.get(name)
        return now if known is None else max(now, known.made_at + _STEP_S)

    def removed(self, name: str, *, now: float) -> Pin:
        """Return what removes a pin, for `take`; ConfigError: there is none of that name."""
        known = self._by_name.get(name)
        if known is None or not known.keys or known.until <= now:
            raise ConfigError(f"There is no pin {name!r:.90}; `kvray pin` lists those that are.")
        return replace(known, keys=b"", made_at=self.later_than_known(name, now))

    def _has_room(self, pin: Pin, known: Pin | None) -> bool:
        num_keys = sum(one.num_blocks for one in self._by_name.values() if one is not known)
        is_one_more = known is None and len(self._by_name) >= PINS_MAX
        return not is_one_more and num_keys + pin.num_blocks <= KEYS_MAX
