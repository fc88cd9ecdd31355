"""Who may read the page: the names it is reached by, and the tier's token."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from kvray.config import KVRayConfig
from kvray.identity.block import frame
from kvray.identity.tenant import read_secret


class Gate:
    """Decides about requests; it reads the token at each, so that a new one holds at once."""

    def __init__(self, config: KVRayConfig, *, names: Iterable[str], port: int) -> None:
        """Admit browsers that call this server by one of `names`, or by an address."""
        self._token_file = config.security.auth_token_file
        self._cluster_name = config.cluster_name
        self._names = frozenset(name.lower() for name in names)
        self._cookie = f"kvray_{port}"  # browsers send cookies to all ports of a host

    def knows_host(self, request: Request) -> bool:
        """Return whether the request means this server.

        A page of somebody else may have its own name point here (DNS rebinding), and would read the
        answers. It cannot do that with an address.
        """
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def admits(self, request: Request) -> bool:
        """Return whether the request has the token, if there is one.

        ConfigError: the token cannot be read.
        """
        if self._token_file is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = given if scheme.lower() == "bearer" else request.query_params.get("token", "")
        proofs = [request.cookies.get(self._cookie, ""), self._proof(token.strip().encode())]
        expected = self._expected().encode()
        return any(hmac.compare_digest(expected, proof.encode()) for proof in proofs)

    def remember(self, response: Response) -> None:
        """Have the browser prove from now on that it had the token; it does not keep the token."""
        if self._token_file is not None:
            response.set_cookie(
                self._cookie, self._expected(), httponly=True, samesite="strict", path="/"
            )

    def _expected(self) -> str:
        assert self._token_file is not None
        return self._proof(read_secret(self._token_file, setting="security.auth_token_file"))

    def _proof(self, token: bytes) -> str:
        message = frame(b"kvray.page", self._cluster_name.encode())
        return hmac.new(token, message, hashlib.sha256).hexdigest()
