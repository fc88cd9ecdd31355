from kvray.lab.replay.fleet import compare_routers
from kvray.lab.replay.fleet.report import make_figure
from tests.unit.lab.replay.excerpts import SYNTHETIC, excerpt
from tests.unit.lab.replay.fleet.synthetic import plan


def test_both_pictures_start_at_0_and_name_every_router() -> None:
    found = compare_routers(excerpt(SYNTHETIC), plan(4), ["pow2", "kvray"])

    for axes in make_figure(found).axes:
        assert axes.get_ylim()[0] == 0
        assert [label.get_text() for label in axes.get_xticklabels()] == ["pow2", "kvray"]
