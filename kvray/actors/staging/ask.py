"""The type of calls to other actors; imports no Ray."""

from typing import Any, Protocol

from kvray.errors import ShardUnavailable


class Ask(Protocol):
    """Calls a method of a named actor in another process."""

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Return the method's answer, or raise its KVRayError.

        ShardUnavailable: no answer within `timeout_s`, or there is no such actor.
        """
        ...


async def ask_nobody(actor: str, method: str, *args: Any, timeout_s: float) -> Any:
    """Fail: the `Ask` of a shard without Ray."""
    raise ShardUnavailable(f"{actor} cannot be called: this shard was started without Ray.")
