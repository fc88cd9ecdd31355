"""A tmpfs with huge pages that only this process sees, for as long as it runs."""

import ctypes
import os
from pathlib import Path

from kvray.errors import ConfigError

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


def mount_huge(directory: Path, *, size: int) -> None:
    """Mount a tmpfs of `size` bytes and huge pages over the empty `directory`.

    This thread gets a mount namespace of its own first, and so do the threads that it starts: the
    mount ends with the process, even if that is killed, and no other one ever sees it.

    Raises:
        ConfigError: this user, or this kernel, may not.
    """
    options = f"size={size},huge=advise,mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(_libc.mount(b"kvray-bench", bytes(directory), b"tmpfs", flags, options))


def unmount(directory: Path) -> None:
    """Take the mount away; what is still mapped of it stays until it is let go."""
    _libc.umount2(bytes(directory), _MNT_DETACH)


def _check(result: int) -> None:
    if result:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"No tmpfs with huge pages can be mounted here ({reason}); have root mount one, and"
            " name it with --arena-dir."
        )
