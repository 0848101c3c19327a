"""The cache of one engine, kept in its scheduler's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexcache.cache.journal import Change
from flexcache.cache.prompt import Prompt
from flexcache.client.slots import BlockIds
from flexcache.client.tasks import ClientTasks
from flexcache.config import CacheConfig, ModelConfig
from flexcache.ids import TaskKind
from flexcache.request_info import PromptDetail
from flexcache.server.local_session import LocalSession
from flexcache.server.operator import open_http
from flexcache.server.server import KVServer
from flexcache.tasks.instructions import MatchedTask
from flexcache.tasks.stats import to_plain


class LocalTransport:
    """Calls a server of its own, under that server's lock; answers come by call, under it too."""

    def __init__(
        self, endpoint: str | None, model: ModelConfig, config: CacheConfig, engine: str
    ) -> None:
        self.server = KVServer(config, endpoint, model=model, engine=engine, open_http=open_http)
        self.detail: PromptDetail = config.wanted
        self._engine = engine
        self._session = LocalSession(self.server)

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def start(self, tasks: ClientTasks) -> None:
        ids = self.server.start(tasks)
        assert ids is not None
        self._session.ids = ids

    def is_ready(self) -> bool:
        return not self.server.stopping and not self.server.missing(self._engine)

    def wait_ready(self, timeout: float | None) -> None:
        self.server.wait_ready(self._engine, timeout)

    def match(
        self, kind: TaskKind, prompt: Prompt, look_up: bool, may_wait: bool
    ) -> MatchedTask | None:
        return self._session.match(kind, prompt, look_up, may_wait)

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds], gated: bool) -> None:
        self._session.launch(task_ids, gpu_blocks, gated)

    def cancel(self, task_ids: Sequence[int]) -> None:
        self._session.cancel(task_ids)

    def report_prefill(self, blocks_per_s: float) -> None:
        self._session.report_prefill(blocks_per_s)

    def take_changes(self) -> list[Change]:
        return self.server.take_changes()

    def clear(self, tier: str | None) -> int:
        return self.server.clear(tier)

    def stats(self) -> dict[str, Any]:
        return to_plain(self.server.stats(self._session.ids.session))

    def check(self) -> None:
        with self.server.session() as tasks:
            tasks.check()

    def close(self) -> None:
        self.server.shutdown()
