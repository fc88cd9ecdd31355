"""What memory is worth to the traffic as it is: a sample of it, and a curve of small replays."""

from kvray.store.sizing.curve import CPU_SHARE, Plan, Steps, curve, is_sure, result_of
from kvray.store.sizing.prompts import SampledPrompts
from kvray.store.sizing.sample import PROMPTS_MAX, TrafficSample, Window

__all__ = [
    "CPU_SHARE",
    "PROMPTS_MAX",
    "Plan",
    "SampledPrompts",
    "Steps",
    "TrafficSample",
    "Window",
    "curve",
    "is_sure",
    "result_of",
]
