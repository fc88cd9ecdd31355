"""`kvray replay` as it is installed, over the tier's own parts."""

import json

from kvray.lab.replay import belady
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES
from tests.forks import RunKvray
from tests.unit.lab.replay.excerpts import SESSIONS, excerpt
from tests.unit.lab.replay.lru import lru_hits


def test_all_policies_are_replayed(run_kvray: RunKvray) -> None:
    done = run_kvray("replay", SESSIONS, "--capacity", "300,1k", "--json")
    assert done.returncode == 0, done.stderr
    found, trace = json.loads(done.stdout), excerpt(SESSIONS)
    hits = {(one["host_blocks"], one["policy"]): one["hit_blocks"] for one in found["results"]}
    assert set(hits) == {(size, name) for size in (300, 1000) for name in POLICIES}
    for (size, _), one in hits.items():
        assert 0 < one <= belady(trace, size).hit_blocks
    for size in (300, 1000):  # a tier of this size is kept up to 16 blocks below full
        assert sum(lru_hits(trace, size - 16)) <= hits[size, "lru"] <= sum(lru_hits(trace, size))


def test_a_disk_is_replayed_with_all_admissions(run_kvray: RunKvray) -> None:
    done = run_kvray(
        *("replay", SESSIONS, "--capacity", "1k", "--nvme", "2k", "--policy", "gittins", "--json")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    runs = {(one["policy"], one["admission"]): one for one in found["results"]}
    assert set(runs) == {("lru", "all"), *(("gittins", name) for name in ADMISSIONS)}
    for one in runs.values():
        assert one["nvme_hit_blocks"] > 0
        assert one["host_hit_blocks"] + one["nvme_hit_blocks"] == one["hit_blocks"]
    written = {run: one["nvme_written_blocks"] for run, one in runs.items()}
    assert written["gittins", "twice"] <= written["gittins", "all"]
