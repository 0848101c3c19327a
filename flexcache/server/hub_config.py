"""Facts about a server that do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from flexcache.ids import PromptDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """What the hub knows of its server.

    Attributes:
        epoch: Part of the server's task ids.
        server_pid: The server's process.
        pid_namespace: Where that id counts; 0: not known.
        client_timeout_s: A peer silent for this long is considered dead.
        owner: The engine in this process, if it shares the cache with no other.
        prompt_detail: How much of a prompt's metadata the observers need.
        first_session: Number of the first session.
    """

    epoch: int
    server_pid: int
    pid_namespace: int = 0
    client_timeout_s: float
    owner: str | None = None
    prompt_detail: PromptDetail = PromptDetail.NOTHING
    first_session: int = 1
