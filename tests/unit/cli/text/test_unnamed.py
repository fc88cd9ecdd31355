"""What status and doctor say of engines that still read their checkpoints."""

from typing import Any

from kvray.cli.doctor.tier import hit_findings
from kvray.cli.text.status import unnamed_sentences


def replica(**changes: Any) -> dict[str, Any]:
    counters = {
        "fingerprint_bytes": 120 * 2**30,
        "fingerprint_bytes_read": 30 * 2**30,
        "fingerprint_failed": 0,
        "uptime_s": 20,
    }
    own = {"replica": "a", "rank": 0, "connected": True, "namespace": "01"}
    return own | {"counters": counters | changes}


def test_the_sentence_says_how_far_a_reading_is_and_what_to_do() -> None:
    ((says, fix),) = unnamed_sentences([replica()])
    assert says.startswith("replica a rank 0 uses no tier until")
    assert says.endswith("30GiB of 120GiB read, about 60 s left")
    assert "connector.model_key" in fix


def test_a_reading_that_has_just_begun_has_no_time_left() -> None:
    ((says, _),) = unnamed_sentences([replica(fingerprint_bytes_read=0)])
    assert says.endswith("of 120GiB read")


def test_figures_that_are_missing_count_as_none() -> None:
    said = []
    for one in ({}, {"fingerprint_bytes_read": 2**29}):
        ((says, _),) = unnamed_sentences(
            [replica() | {"counters": {"fingerprint_bytes": 2**30} | one}]
        )
        said.append(says.partition(": ")[2])
    assert said == ["0B of 1GiB read", "512MiB of 1GiB read, about 0 s left"]


def test_a_reading_that_failed_leads_to_the_log() -> None:
    ((says, fix),) = unnamed_sentences([replica(fingerprint_failed=1)])
    assert "cannot read its checkpoint" in says
    assert "log" in fix


def test_who_knows_its_checkpoint_or_is_gone_has_no_sentence() -> None:
    known = replica()
    known["counters"] = {"uptime_s": 20}
    assert not list(unnamed_sentences([known, replica() | {"connected": False}]))


def test_doctor_says_why_nothing_is_promised_yet() -> None:
    status = {"shards": [{"replicas": [replica()]}]}
    findings = {one.check: one for one in hit_findings(status)}
    assert "30GiB of 120GiB" in findings["checkpoint"].says
