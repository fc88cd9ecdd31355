"""Tells the requests of one engine apart: by salt, tenant, adapter and media."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvray.connector.request.identity import Regularity, identify, prompt_len_of
from kvray.engine.model.adapters import Adapters, fingerprints_dir
from kvray.engine.model.checkpoint import MediaTokens
from kvray.engine.request.identity import AskedRequest, Identity, Tenancy
from kvray.errors import ConfigError
from kvray.identity.tenant import TenantSalts


class RequestIdentifier:
    """Used by the engine's executor thread."""

    def __init__(
        self,
        totals: Counter[str],
        *,
        adapters: str,
        media_tokens: MediaTokens | None,
        tenants: TenantSalts | None,
    ) -> None:
        self.tenancy = Tenancy(tenants, totals)
        self.adapters = Adapters(settings=adapters, cache_dir=fingerprints_dir())
        self.hides_media = False
        """Whether the engine was seen to ask about a request without showing its media."""
        self._media_tokens = media_tokens
        self._regularity = Regularity()

    def read(self, request: Any, num_computed: Any) -> AskedRequest | None:
        """Return what the engine asks about; None: it cannot be told, or is not what it should be.

        `request` may lack what Python knows of it. ConfigError: as `identity.identify`.
        """
        try:
            tokens, prompt_len = request.get_tokens(0), prompt_len_of(request)
            if type(tokens) is not list or not tokens:
                return None
            if prompt_len > len(tokens) and hasattr(request, "prompt_len"):
                return None
            end = min(len(tokens), prompt_len)
            if type(num_computed) is not int or not 0 <= num_computed <= end:
                return None
            identity = self._identify_asked(request, tokens)
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - a foreign object may be anything, and raise what it likes
            return None
        if identity is None:
            return None
        return AskedRequest(
            request_id=request.request_id,
            tokens=tokens,
            prompt_len=end,
            num_computed=num_computed,
            identity=identity,
        )

    def identify(self, request: Any) -> Identity | None:
        """Return what the request shows of what enters its keys; raises as `identity.identify`."""
        identity = identify(request, self.adapters.fingerprint)
        return None if identity is None else self.tenancy.apply(identity)

    def _identify_asked(self, request: Any, tokens: Sequence[int]) -> Identity | None:
        if self._regularity.is_lacking(request):
            return None
        identity = self.identify(request)
        # Only Python attributes tell of some media, and a copy of the request lacks those.
        if identity is None or identity.media or hasattr(request, "py_multimodal_data"):
            return identity
        is_text = self._media_tokens is None or not self._media_tokens.may_be_in(tokens)
        return identity if is_text and not self.hides_media else None
