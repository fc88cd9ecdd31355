"""The error tree: every exception that kvray raises on purpose.

A miss is never an exception (a lookup answers with a shorter prefix); these classes are for
what a person or a caller has to act on. Each takes one message, so that it survives pickling
through Ray.
"""

import collections.abc
import contextlib


@contextlib.contextmanager
def needs(extra: str) -> collections.abc.Iterator[None]:
    """Raise ConfigError with the line that installs what an import in the block misses."""
    try:
        yield
    except ModuleNotFoundError as error:
        says = f"There is no {error.name} here; run `pip install 'kvray[{extra}]'`."
        raise ConfigError(says) from error


class KVRayError(Exception):
    """Base of all errors of kvray; the message is a full sentence with the fix in it."""


class ConfigError(KVRayError, ValueError):
    """A setting, an argument or an input that cannot be used as given."""


class LayoutMismatch(KVRayError):
    """Two parties that claim the same model hold blocks of different shape or size."""


class CapacityError(KVRayError):
    """The memory or the table that was asked for does not exist or does not fit."""


class LeaseExpired(KVRayError):
    """A lease was used after its release, or after its arena was retired."""


class ShardUnavailable(KVRayError):
    """A shard, its arena or its socket did not answer within the deadline."""


class TierError(KVRayError):
    """A storage tier failed."""


class CorruptBlock(TierError):
    """The bytes of a block do not have the checksum recorded for them."""


class TransferError(KVRayError):
    """A transfer between nodes failed."""


class TransferTimeout(TransferError):
    """A transfer between nodes missed its deadline."""


class TransportUnavailable(TransferError):
    """The library or the device that a transport needs is not there."""
