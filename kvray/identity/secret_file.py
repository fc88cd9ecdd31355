"""A file with a secret: read only if nobody but its user and its group can read it."""

import os
import stat
from pathlib import Path

from kvray.errors import ConfigError

_BYTES_MIN = 16
_BYTES_MAX = 4096
_OPEN_TO_OTHERS = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP


def read_secret(path: Path, *, setting: str) -> bytes:
    """Return the secret in a file, without the white space around it.

    The group may read it: the engines of a node and its Ray may be of different users. `path` may
    be a link, as Kubernetes mounts them; messages name the `setting`.
    """
    try:
        # Asked of what was opened, and not of the path; a pipe must not be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            secret = os.read(fd, _BYTES_MAX + 1) if stat.S_ISREG(found.st_mode) else b""
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"The file {path} of {setting} cannot be read ({reason}); put it there, readable for"
            " this user: without it nothing starts."
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"{path} of {setting} is no plain file; name the file that has the secret."
        )
    if stat.S_IMODE(found.st_mode) & _OPEN_TO_OTHERS:
        raise ConfigError(
            f"The file {path} of {setting} has mode {stat.S_IMODE(found.st_mode):04o}, so others"
            f" can read or change it; run `chmod 600 {path}` (640 for a group) and make a new"
            " secret."
        )
    secret = secret.strip()
    if len(secret) < _BYTES_MIN or len(secret) > _BYTES_MAX:
        raise ConfigError(
            f"The file {path} of {setting} must hold {_BYTES_MIN} to {_BYTES_MAX} bytes, not"
            f" {len(secret)}; make one with `openssl rand -hex 32`."
        )
    return secret
