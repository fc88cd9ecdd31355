"""The token that a caller needs to end, clear or change a tier, if its settings name one.

A caller sends a proof that it has the token, over Ray's own channel. The token stops mistakes and
other people's jobs. It stops no attacker: anybody who connects to a Ray cluster may run code there.
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
from kvray.actors.ray_glue.calls import ask, list_actors
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.identity.block import frame
from kvray.identity.tenant import read_secret

_ASK_S = 6.0
_NONCE_BYTES = 32


def proof_of(config: KVRayConfig | None) -> str:
    """Return the proof that we have the token of `config`; empty if it names none."""
    if config is None or config.security.auth_token_file is None:
        return ""
    token = read_secret(config.security.auth_token_file, setting="security.auth_token_file")
    message = frame(b"kvray.admin", config.cluster_name.encode())
    return hmac.new(token, message, hashlib.sha256).hexdigest()


def check_proof(config: KVRayConfig, proof: str) -> None:
    """Raise ConfigError for a caller without the token of the tier that runs with `config`.

    It reads the token at each call, so that a new one in the file holds at once. If nobody can read
    it, the user of this process may still end the tier, and proves it with a file (`_witness`).
    """
    digest, _, witness = proof.partition(" ")
    try:
        expected = proof_of(config)
    except ConfigError as error:
        if _is_own(witness):
            return
        raise ConfigError(
            f"{error} On a node of the tier, the user that runs it may end it without a token."
        ) from None
    if not expected and not witness:
        return
    # A caller with a witness was refused by a part that has a token: this part has no say.
    if not expected or not hmac.compare_digest(expected.encode(), digest.encode()):
        raise ConfigError(
            f"The tier {config.cluster_name!r} is ended, cleared and changed with a token only;"
            " name a file that has it in security.auth_token_file."
        )


def ask_to_be_admitted(config: KVRayConfig | None, *, timeout_s: float) -> None:
    """Raise ConfigError unless the token of `config` is that of the tier in this Ray cluster.

    The supervisor decides, or else any shard. If none admits us, we ask each whether it has lost
    its token and we are its user. A tier without parts refuses nothing.
    """
    fault, proof = None, ""
    try:
        proof = proof_of(config)
    except ConfigError as error:
        fault = error  # about the caller's own file, which says more than any refusal
    timeout_s = min(timeout_s, _ASK_S)
    shards = list_actors(SHARD_PREFIX)
    answers = _answers([SUPERVISOR_NAME], proof, timeout_s)
    answers = answers or _answers(shards, proof, timeout_s)
    if not answers or None in answers:
        return
    with _witness() as witness:
        again = _answers([*shards, SUPERVISOR_NAME], f"{proof} {witness}", timeout_s)
    if None not in again:
        refusal = fault or answers[0]
        assert refusal is not None, "nobody has admitted us"
        raise refusal


def _answers(names: Iterable[str], proof: str, timeout_s: float) -> list[KVRayError | None]:
    """Return the refusals of the parts that answer; None for each that admits us."""
    answers = ask(names, "admit", timeout_s, proof).values()
    return [answer for answer in answers if not isinstance(answer, ShardUnavailable)]


@contextlib.contextmanager
def _witness() -> Iterator[str]:
    """Prove the user of this process during a block, with a private file of that user.

    Gives the argument of `_is_own`; empty if no file can be made.
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
    """Return whether a private file of this process's user has the content that the caller says."""
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
