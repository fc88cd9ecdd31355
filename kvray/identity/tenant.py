"""Tenants: callers of an engine's API who share its tier and must not learn of each other.

A request names its tenant in its cache salt, `<tenant>/<salt>` or the tenant alone. Whoever admits
requests to the engine writes the tenant there; kvray cannot know who is calling. With a secret that
the tenants do not have, what is salted is not that text but

    HMAC-SHA256(secret, frame("kvray.tenant", tenant, salt)), as hex digits

so that no other tenant, and nobody without the secret, can name a key of this one. Engines that
hand on only a number, a hash of the salt, have no tenant in it; the number stands for both:

    HMAC-SHA256(secret, frame("kvray.tenant.id", the number's hex digits)), as hex digits
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvray.config import TENANT_NAME
from kvray.identity.block import frame, namespace_id, tagged
from kvray.identity.secret_file import read_secret

_REMEMBERED = 4096
"""Salts whose derivation is remembered."""
_SALT_MAX = 256
"""Characters of a remembered salt: callers choose them, and must not fill the memory."""
_NAME = re.compile(TENANT_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSalt:
    """The salt and number of a tenant's request."""

    salt: str
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
            salt=self._mac(b"kvray.tenant", tenant.encode(), own),
            tenant_id=tenant_id(tenant),
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
