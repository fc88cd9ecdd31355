"""Whose is a directory that lies where everybody may write?"""

import os
import stat
from pathlib import Path


def is_own(directory: Path) -> bool:
    """Return whether `directory` is there, is no link to one, and is this user's."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
