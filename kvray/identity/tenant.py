"""Tenants: callers of an engine's API who share its tier and must not learn of each other.

A request names its tenant in its cache salt, `<tenant>/<salt>` or the tenant alone. Whoever admits
requests to the engine writes the tenant there; kvray cannot know who is calling. With a secret that
the tenants do not have, what is salted is not that text but

    HMAC-SHA256(secret, frame("kvray.tenant", tenant, salt)), as hex digits

so that no other tenant, and nobody without the secret, can name a key of this one. Engines that
hand on only a number, a hash of the salt, have no tenant in it; the number stands for both:

    HMAC-SHA256(secret, frame("kvray.tenant.id", the number's hex digits)), as hex digits

The file with the secret is read only if nobody but its user and its group can read it.
"""

import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kvray.config import TENANT_NAME
from kvray.errors import ConfigError
from kvray.identity.block import frame, namespace_id, tagged

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


_REMEMBERED = 4096
"""Salts whose derivation is remembered."""
_SALT_MAX = 256
"""Characters of a remembered salt: callers choose them, and must not fill the memory."""
_NAME = re.compile(TENANT_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSalt:
    """The salt and number of a tenant's request."""

    salt: str = field(repr=False)
    """Takes the place of the request's own salt."""
    tenant_id: int
    """An arena's number of the tenant, for its quota; see `tenant_id`."""


class TenantSalts:
    """Derives salts with one secret, equal in every process that has it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        # The same users come again and again, and the engine waits for this.
        self._derived = lru_cache(maxsize=_REMEMBERED)(self._derive)

    @classmethod
    def read(cls, path: Path) -> "TenantSalts":
        """Derive with the secret in the file of `security.tenant_secret_file`."""
        return cls(read_secret(path, setting="security.tenant_secret_file"))

    @property
    def check(self) -> str:
        """A text that tells equal secrets from unequal ones, and reveals nothing else."""
        return self._mac(b"kvray.tenant.check")[:16]

    def derive(self, salt: str | int | None) -> TenantSalt | None:
        """Return the salt of a request, from its cache salt; None: it names no tenant.

        Such a request must share nothing with any other. ConfigError: neither text nor whole
        number.
        """
        if salt is None:
            return None
        if not isinstance(salt, str):
            number = tagged(salt, what="The cache salt")
            return TenantSalt(salt=self._mac(b"kvray.tenant.id", number), tenant_id=_id_of(number))
        return self._derived(salt) if len(salt) <= _SALT_MAX else self._derive(salt)

    def _derive(self, salt: str) -> TenantSalt | None:
        tenant, _, rest = salt.partition("/")
        if not _NAME.fullmatch(tenant):
            return None
        own = rest.encode("utf-8", "surrogatepass")
        return TenantSalt(
            salt=self._mac(b"kvray.tenant", tenant.encode(), own), tenant_id=tenant_id(tenant)
        )

    def _mac(self, *items: bytes) -> str:
        return hmac.new(self._secret, frame(*items), hashlib.sha256).hexdigest()


def tenant_id(tenant: str) -> int:
    """Return an arena's number of a tenant; never 0, which is nobody's.

    It is a hash of 32 bits: two tenants that share one would share a quota, but no block.
    """
    return _id_of(tenant.encode())


def _id_of(name: bytes) -> int:
    return namespace_id(hashlib.sha256(frame(b"kvray.tenant", name)).digest()) or 1
