"""What memory is worth to the traffic as it is: a sample of it, and a curve of small replays."""

from kvray.store.sizing.curve import SIZES, curve, result_of
from kvray.store.sizing.prompts import SampledPrompts
from kvray.store.sizing.sample import TrafficSample, Window

__all__ = ["SIZES", "SampledPrompts", "TrafficSample", "Window", "curve", "result_of"]
