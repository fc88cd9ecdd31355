from kvray.lab.replay import Plan, compare
from kvray.lab.replay.report import make_figure
from tests.unit.cli.replay_stand_in import simulate
from tests.unit.lab.replay.excerpts import CONVERSATION, excerpt


def test_the_picture_starts_at_0_and_names_both_bounds() -> None:
    plan = Plan(policies=["double"], host_blocks=[100, 1000])
    found = compare(excerpt(CONVERSATION), plan, simulate)

    (axes,) = make_figure(found).axes

    assert axes.get_ylim()[0] == 0
    assert [line.get_label() for line in axes.get_lines()] == [
        *("lru", "double", "Belady", "infinite cache")
    ]
