"""Digests that a hub's cache already knows: it names large files by them."""

import os
import re
from pathlib import Path

from kvray.identity.checkpoint import CheckpointFile

_DIGEST = re.compile(r"[0-9a-f]{64}")


def named_by_hub(file: CheckpointFile) -> bytes | None:
    """Return the digest by which a hub's cache names a file, if it can be trusted.

    The cache has `snapshots/<revision>/<name>`, a link to `blobs/<sha256>`, made once the file is
    there and named. A file that was written, replaced or restored after any of its links was made
    is read instead: somebody may have edited it in place.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache; names of 40 digits, of
    small files, are another hash.
    """
    blob = Path(os.path.realpath(file.path))
    if not _DIGEST.fullmatch(blob.name) or blob.parent.name != "blobs":
        return None
    place = Path(os.path.realpath(file.path.parent), file.path.name)
    snapshots = blob.parent.parent / "snapshots"
    if snapshots not in place.parents:
        return None
    _, *below = place.relative_to(snapshots).parts
    links = [revision.joinpath(*below) for revision in snapshots.iterdir()]
    made = [os.lstat(link) for link in links if os.path.realpath(link) == str(blob)]
    is_older = all(
        file.mtime_ns <= link.st_mtime_ns and file.ctime_ns <= link.st_ctime_ns for link in made
    )
    return bytes.fromhex(blob.name) if made and is_older else None
