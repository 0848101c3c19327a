"""Decides which loads run within the engine step that computes with them, layer by layer.

Such a load saves the step in which a request only waits, and computing begins when its first layer
has arrived. But the whole step waits for it, and so does every request in the step.
"""

from __future__ import annotations

from collections.abc import Iterable

from flexcache.errors import ConfigError


class LayerwiseRule:
    """The setting ``layerwise_load``, applied to one engine.

    Args:
        setting: "auto", "on" or "off".
        obstacle: Why this engine does not support it; None if it does.

    Raises:
        ConfigError: The setting is "on" and not supported.
    """

    def __init__(self, setting: str, obstacle: str | None) -> None:
        if setting == "on" and obstacle is not None:
            raise ConfigError(f"layerwise_load = 'on': {obstacle}")
        self._is_off = setting == "off" or obstacle is not None
        self._always = setting == "on"
        self._running: set[str] = set()

    @property
    def depends_on_times(self) -> bool:
        """Whether it matters how long loads and steps take."""
        return not self._is_off and not self._always

    def step(self, request_ids: Iterable[str]) -> None:
        """Record which requests the step computes that is about to start."""
        self._running = set(request_ids)

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)

    def allows(self, request_id: str) -> bool:
        """Return whether a load from DRAM may run within the step in which the request starts,
        however long it takes."""
        return not self._is_off and (self._always or self._running <= {request_id})
