"""The token that ending, clearing and changing a tier ask for, if its settings name one.

What travels, over Ray's own channel, is a proof of having the token and not the token. It keeps
mistakes and jobs of other people off a tier, and nobody who means harm: whoever may connect to a
Ray cluster may run code in it.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator

from kvray.actors.names import SHARD_PREFIX, SUPERVISOR_NAME
from kvray.actors.ray_glue.calls import ask, list_actors, mapped_errors
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.identity.block import frame
from kvray.identity.secret_file import read_secret

_ASK_S = 6.0
_NONCE_BYTES = 32


def proof_of(config: KVRayConfig | None) -> str:
    """Return the proof of having the token that `config` names; empty if it names none."""
    if config is None or config.security.auth_token_file is None:
        return ""
    token = read_secret(config.security.auth_token_file, setting="security.auth_token_file")
    message = frame(b"kvray.admin", config.cluster_name.encode())
    return hmac.new(token, message, hashlib.sha256).hexdigest()


def check_proof(config: KVRayConfig, proof: str) -> None:
    """Refuse a caller without the token of the tier that runs with `config`.

    The token is read at each call, so that a new one in its file holds at once. If it cannot be
    read, a caller is let in that proves to be this process's user (see `_witness`): somebody must
    be able to end the tier.

    Raises:
        ConfigError: it has another token or none, or the token cannot be read here.
    """
    digest, _, witness = proof.partition(" ")
    try:
        expected = proof_of(config)
    except ConfigError as error:
        if _is_own(witness):
            return
        raise ConfigError(
            f"{error} The user that runs the tier may end it without, on a node of the tier."
        ) from None
    if not expected and not witness:
        return
    # A part that has a token refused a caller with a witness before: this part has no say.
    if not expected or not hmac.compare_digest(expected.encode(), digest.encode()):
        raise ConfigError(
            f"The tier {config.cluster_name!r} is ended, cleared and changed with a token only;"
            " name a file that has it in security.auth_token_file."
        )


def ask_to_be_admitted(config: KVRayConfig | None, *, timeout_s: float) -> None:
    """Ask the tier of this Ray cluster whether the token of `config` is its own.

    The supervisor decides, or else any shard. Where none lets us in, each is asked whether it has
    lost its token and we are its user. A tier that has no part left can refuse nothing.

    Raises:
        ConfigError: it is not.
    """
    fault, proof = None, ""
    try:
        proof = proof_of(config)
    except ConfigError as error:
        fault = error  # of the caller's own file, which tells more than any refusal
    timeout_s = min(timeout_s, _ASK_S)
    answers = _answers([SUPERVISOR_NAME], proof, timeout_s)
    answers = answers or _answers(_shards(), proof, timeout_s)
    if not answers or None in answers:
        return
    with _witness() as witness:
        again = _answers([*_shards(), SUPERVISOR_NAME], f"{proof} {witness}", timeout_s)
    if None not in again:
        refusal = fault or answers[0]
        assert refusal is not None, "nobody has let us in"
        raise refusal


def _shards() -> list[str]:
    with mapped_errors():
        return [name for name in list_actors() if name.startswith(SHARD_PREFIX)]


def _answers(names: Iterable[str], proof: str, timeout_s: float) -> list[KVRayError | None]:
    """Return the refusals of the parts that answer; None for each that lets us in."""
    answers = ask(names, "admit", timeout_s, proof).values()
    return [answer for answer in answers if not isinstance(answer, ShardUnavailable)]


@contextlib.contextmanager
def _witness() -> Iterator[str]:
    """Show whose this process is, for as long as the block lasts: by a file that it has made.

    Nobody else can make a file of this user's, and nobody else can read this one. Gives what
    `_is_own` is to look at; empty if no file can be made.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    try:
        fd, path = tempfile.mkstemp(prefix="kvray-admit-")
    except OSError:
        yield ""
        return
    try:
        with open(fd, "w") as file:
            file.write(nonce)
        yield f"{nonce} {path}"
    finally:
        os.unlink(path)


def _is_own(witness: str) -> bool:
    """Return whether a file of this process's user has what the caller says is in it."""
    nonce, _, path = witness.partition(" ")
    if len(nonce) != 2 * _NONCE_BYTES:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return False
    try:
        found = os.fstat(fd)
        is_mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        is_private = stat.S_IMODE(found.st_mode) == 0o600
        return is_mine and is_private and os.read(fd, 2 * len(nonce)) == nonce.encode()
    finally:
        os.close(fd)
