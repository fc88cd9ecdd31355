"""What besides its tokens tells one request from another: salt, tenant, LoRA adapter and media."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvray.identity.keys import MediaItem
from kvray.identity.tenant import TenantSalts

_log = logging.getLogger("kvray.connector")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What enters the keys of a request beside its tokens."""

    salt: str | int | None = None
    lora: bytes | None = None
    media: tuple[MediaItem, ...] = ()
    tenant_id: int = 0  # what an arena knows the request's tenant by; 0: it has none

    @property
    def is_plain(self) -> bool:
        """Whether nothing but its tokens tells it from other requests of its namespace."""
        return self.salt is None and self.lora is None and not self.media


class AskedRequest(NamedTuple):
    """A prompt that has keys, or would have them if its model had a name."""

    request_id: int
    tokens: list[int]
    prompt_len: int  # tokens that the engine counts as the prompt; at most all
    num_computed: int  # leading tokens that the engine has itself
    identity: Identity
    is_unread: bool = False
    """Whether it reads no cache: it is saved, and promised nothing."""

    def num_askable(self, tokens_per_block: int) -> int:
        """Return how many leading blocks may be promised: the engine computes the last token."""
        return max(0, (self.prompt_len - 1) // tokens_per_block)


class Tenancy:
    """Puts each request under its tenant, where the cluster has tenants."""

    def __init__(self, tenants: TenantSalts | None, totals: Counter[str]) -> None:
        self.tenants = tenants
        self._totals = totals
        self._warned = False

    def apply(self, identity: Identity) -> Identity | None:
        """Return the identity with its tenant's salt; None: it names no tenant, and none is known.

        Nobody could find what is stored under a salt that no other request has.
        """
        if self.tenants is None:
            return identity
        derived = self.tenants.derive(identity.salt)
        if derived is not None:
            return replace(identity, salt=derived.salt, tenant_id=derived.tenant_id)
        self._totals["tenantless_requests"] += 1
        if not self._warned:
            self._warned = True
            _log.warning(
                "kvray: a request names no tenant, so it shares nothing and nothing of it is kept;"
                " have what admits requests set cache_salt to <tenant>/<salt> (said once)."
            )
        return None
