"""The token that ending, clearing and changing a tier ask for, if its settings name one.

What travels, over Ray's own channel, is a proof of having the token and not the token. It keeps
mistakes and jobs of other people off a tier, and nobody who means harm: whoever may connect to a
Ray cluster may run code in it.
"""

import contextlib
import hashlib
import hmac

from kvray.actors.ray_calls import (
    SHARD_PREFIX,
    SUPERVISOR_NAME,
    ask_all,
    call,
    get_actor,
    list_actors,
    mapped_errors,
)
from kvray.block import frame
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.secret_file import read_secret

_ASK_S = 6.0


def proof_of(config: KVRayConfig | None) -> str:
    """Return the proof of having the token that `config` names; empty if it names none.

    Raises:
        ConfigError: the token cannot be read.
    """
    if config is None or config.security.auth_token_file is None:
        return ""
    token = read_secret(config.security.auth_token_file, setting="security.auth_token_file")
    message = frame(b"kvray.admin", config.cluster_name.encode())
    return hmac.new(token, message, hashlib.sha256).hexdigest()


def check_proof(config: KVRayConfig, proof: str) -> None:
    """Refuse a caller without the token of the tier that runs with `config`.

    The token is read at each call, so that another one in its file holds at once.

    Raises:
        ConfigError: it has another token or none, or the token cannot be read here.
    """
    expected = proof_of(config)
    if expected and not hmac.compare_digest(expected.encode(), proof.encode()):
        raise ConfigError(
            f"The tier {config.cluster_name!r} is ended, cleared and changed with a token only;"
            " name a file that has it in security.auth_token_file."
        )


def ask_to_be_admitted(config: KVRayConfig | None, *, timeout_s: float) -> None:
    """Ask the tier of this Ray cluster whether the token of `config` is its own.

    Any part that answers decides. A tier that has none left can refuse nothing.

    Raises:
        ConfigError: it is not.
    """
    proof = proof_of(config)
    timeout_s = min(timeout_s, _ASK_S)
    # Parts that an earlier kvray has made know of no token.
    with contextlib.suppress(ShardUnavailable, AttributeError):
        call(get_actor(SUPERVISOR_NAME).admit, proof, timeout_s=timeout_s)
        return
    methods = {}
    with mapped_errors():
        names = [name for name in list_actors() if name.startswith(SHARD_PREFIX)]
    for name in names:
        with contextlib.suppress(ShardUnavailable, AttributeError):
            methods[name] = get_actor(name).admit
    for answer in ask_all(methods, timeout_s, proof).values():
        if isinstance(answer, KVRayError) and not isinstance(answer, ShardUnavailable):
            raise answer
