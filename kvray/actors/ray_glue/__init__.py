"""The glue to Ray: actors by name, calls with deadlines, Ray's errors as kvray's.

Only `private.py` uses anything from inside Ray.
"""
