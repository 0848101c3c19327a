"""The processes of a router."""

from __future__ import annotations

from flexcache.config.router import RouterConfig


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT; then let running requests end."""
    raise NotImplementedError
