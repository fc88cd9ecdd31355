"""Which weights an engine has: the version that its namespace names, or none that anybody named."""

import logging
import threading

_log = logging.getLogger("kvray.connector")


class Weights:
    """The version of one engine's weights.

    Any thread says what it is; the engine's thread goes by `state`, which is replaced whole. While
    there is no version nothing is promised or saved: nobody knows whose keys it would have.
    """

    def __init__(self, version: str | None) -> None:
        """Begin with `version`; empty: the checkpoint's own weights, None: not named yet."""
        if version is None:
            _log.warning(
                "kvray: the engine is set up to have its weights replaced while it runs; it goes"
                " without the tier until their version is named, by connector.weights_version or"
                " Client.set_weights_version."
            )
        self._lock = threading.Lock()
        self.state: tuple[int, str | None] = (0, version)
        """How often the version has changed, and what it is now."""

    @property
    def version(self) -> str | None:
        """The version now; None: the weights are being replaced, or were, and have no name."""
        return self.state[1]

    def name(self, version: str | None) -> None:
        """Take `version` for that of the weights from now on; the same one twice changes nothing.

        None: they are about to be replaced, or have just been.
        """
        with self._lock:
            changes, before = self.state
            if version == before:
                return
            self.state = (changes + 1, version)
        if version is None:
            _log.warning(
                "kvray: the engine's weights are replaced; it goes without the tier until their"
                " version is named, see Client.set_weights_version."
            )
        else:
            _log.info("kvray: the engine's weights are of version %r", version)
