"""Several replicas replay a trace in virtual time, each request sent by a router."""

from kvray.lab.replay.fleet.comparison import FleetComparison, compare_routers
from kvray.lab.replay.fleet.plan import FleetPlan
from kvray.lab.replay.fleet.results import FleetOutcome
from kvray.lab.replay.fleet.routers import ROUTERS

__all__ = ["ROUTERS", "FleetComparison", "FleetOutcome", "FleetPlan", "compare_routers"]
