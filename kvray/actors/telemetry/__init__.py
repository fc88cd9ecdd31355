"""Figures and log lines of the actors; only `metrics_export.py` imports Ray."""
