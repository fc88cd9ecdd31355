"""The history of the page is bounded, in time and in replicas."""

from kvray.cli.page.board import Shares
from kvray.cli.text.hits import ReplicaRates


def test_history_is_bounded_in_time_and_in_replicas() -> None:
    shares = Shares()
    rank = ReplicaRates({}, {"prompt_tokens": 4.0, "hit_tokens_from_host": 3.0}, {})
    ranks = [rank._replace(rank={"replica": f"r{number}"}) for number in range(99)]
    for second in range(0, 4000, 2):
        shares.add(second, ranks)
    points = shares.since(0)
    assert (len(points), points[-1]["at"]) == (900, 3998)
    assert {len(one["rates"]) for one in points} == {33}
    assert points[0]["rates"][""] == [0.0, 297.0, 0.0, 0.0, 99.0]
