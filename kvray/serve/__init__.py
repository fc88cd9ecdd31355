"""Engines behind Ray Serve that share their KV blocks through kvray, with OpenAI's endpoint.

`serve run kvray.serve:app model=tiny`. Importing this imports neither ray nor torch: the engine's
process, which must not, runs a module of this package.
"""

from kvray.serve.application import app, engines
from kvray.serve.settings import Settings

__all__ = ["Settings", "app", "engines"]
