"""Statistics of a server that does not run."""

from __future__ import annotations

from flexcache.stats import ServerStats

SERVER_STATS = ServerStats(
    version="1.2", uptime_s=5.0, endpoint="ipc:///a/socket", server_pid=4, workers={},
    worker_restarts={}, worker_up={},
)  # fmt: skip
