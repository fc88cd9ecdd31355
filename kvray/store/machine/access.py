"""Access to a tier's files on a node: for its own user, and for a group if one is named.

Modes are set after a file was made, so that no umask has a say in them. Group members open the
arena, its lock file and the socket. They cannot make or remove files: the directory is not theirs
to write to.
"""

import errno
import grp
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvray.errors import ConfigError, ShardUnavailable


def reason(error: OSError) -> str:
    """Return why nothing can be made in arena.dir, and what to do about it."""
    remedy = "set arena.dir to a tmpfs that this user may write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space there: `kvray sweep` removes arenas that nobody uses"
    return f"({error.strerror}); {remedy}."


def is_own(found: os.stat_result) -> bool:
    """Return whether `lstat` has found a directory of this user, and no link to one."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access for this process's user, or with it for the members of a group."""

    gid: int | None = None

    @classmethod
    def of(cls, group: str | None) -> "Access":
        """Return the access of `arena.group`, a name or a number; ConfigError: unknown here."""
        if group is None:
            return cls()
        if group.isdecimal() and len(group) <= 10 and int(group) < 2**32 - 1:
            return cls(gid=int(group))
        try:
            return cls(gid=grp.getgrnam(group).gr_gid)
        except (KeyError, ValueError):
            raise ConfigError(
                f"arena.group names {group!r:.40}, and this machine has no such group; give one of"
                " `getent group`, or a number where containers know it by other names."
            ) from None

    def give(self, file: int | Path) -> None:
        """Make a file or socket of this user accessible to these people.

        ConfigError: this user may not give it to the group.
        """
        self._give(file, 0o600 if self.gid is None else 0o660)

    def give_directory(self, directory: Path) -> None:
        """Make a directory of this user accessible to these people; raises as `give`."""
        self._give(directory, 0o700 if self.gid is None else 0o750)

    def check_own(self, directory: Path) -> None:
        """Raise ConfigError for another user's directory, or a link: others could write there."""
        if not is_own(directory.lstat()):
            raise ConfigError(
                f"{directory} belongs to another user or is a link; choose another directory, or"
                " another cluster_name."
            )

    def check_trust(self, directory: Path) -> None:
        """Refuse a directory in which somebody else may have put an arena of his own.

        It must be this user's; or of the group, and writable for its user alone. Nobody outside a
        group can make files of that group.
        """
        try:
            found = directory.lstat()
        except OSError:
            return  # what is not there, or cannot be seen, is not opened either
        mode = stat.S_IMODE(found.st_mode)
        is_of_group = self.gid is not None and found.st_gid == self.gid and not mode & 0o022
        if is_own(found) or (stat.S_ISDIR(found.st_mode) and is_of_group):
            return
        raise ShardUnavailable(
            f"{directory} belongs to user {found.st_uid} and group {found.st_gid} with mode"
            f" {mode:04o}; this process, of user {os.geteuid()}, does not trust it: run tier and"
            " engines as one user, or set arena.group for both to a group that both are in."
        )

    def _give(self, file: int | Path, mode: int) -> None:
        if self.gid is not None:
            try:
                os.chown(file, -1, self.gid)
            except PermissionError:
                raise ConfigError(
                    f"This user ({os.geteuid()}) may not give files to the group {self.gid} of"
                    " arena.group; make it a member of the group and restart Ray, or choose"
                    " another group."
                ) from None
        os.chmod(file, mode)  # behind chown, which may clear bits


OWN_USER = Access()
"""The user of this process alone."""
