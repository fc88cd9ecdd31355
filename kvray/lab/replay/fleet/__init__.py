"""Several replicas replay a trace in virtual time, each request sent by a router."""

from kvray.lab.replay.fleet.plan import FleetPlan
from kvray.lab.replay.fleet.routers import ROUTERS
from kvray.lab.replay.fleet.simulator import FleetComparison, FleetOutcome, compare_routers

__all__ = ["ROUTERS", "FleetComparison", "FleetOutcome", "FleetPlan", "compare_routers"]
