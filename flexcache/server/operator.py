"""Sessions in the server's own process: of its engine, and of the HTTP API."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.cache.control import CacheCall, Pin
from flexcache.cache.drain import HotBlocks
from flexcache.cache.prompt import (
    Prompt,
    PromptMaker,
    PromptName,
    check_hint,
    check_version,
    random_version,
)
from flexcache.cache.tiers import IndexedKeys, find_prefix
from flexcache.config.model import EngineKeys
from flexcache.config.values import split_tcp
from flexcache.errors import AmbiguousEngineError, ClosedError, RegistrationError
from flexcache.events.wire import low_64_bits
from flexcache.ids import (
    MAX_KEY_BYTES,
    PromptDetail,
    RootId,
    TaskId,
    TaskIds,
    TaskKind,
    TierName,
)
from flexcache.logs import noted_events
from flexcache.server.cache import ServedCache
from flexcache.server.drain import Drain, DrainProgress
from flexcache.stats import Lately, Stats
from flexcache.tasks.instructions import Offer, PromisedLoad

if TYPE_CHECKING:
    from flexcache.server.http import HttpService
    from flexcache.server.server import KVServer


class LocalSession:
    """Its calls go straight to the task engine, under the server's lock.

    Attributes:
        ids: Number the tasks; to be set before the first call, once the session is open.
    """

    ids: TaskIds

    def __init__(self, server: KVServer) -> None:
        self.server = server
        self._asks_others = server.config.has_peers or server.config.remote_url is not None

    def match(
        self, prompt: Prompt, look_up: bool = True, may_wait: bool = True,
        awaits_loads: bool = False,
    ) -> Offer | None:  # fmt: skip
        """None if the caller may not wait, and the remote store has yet to answer, or what a get
        needs is being loaded early."""
        # Before the ranks have told what there is to cache, every get is a miss.
        if not self.server.is_open:
            with self.server.lock:
                task_id = self.ids.next()
            return Offer(task_id, prompt.kind, prompt.num_tokens, prompt.start)
        if look_up and self._asks_others and not self._look_up(prompt, may_wait):
            return None
        with self.server.lock, self.server.session() as tasks:
            now = time.monotonic()
            if awaits_loads and tasks.awaits_load(self.ids.session, prompt, now):
                return None
            return tasks.match(self.ids.next(), prompt, now)

    def look_up(self, prompt: Prompt) -> None:
        """Begin to ask the remote store about a prompt; no task is made."""
        if self._asks_others and self.server.is_open:
            self._look_up(prompt, may_wait=False)

    def _look_up(self, prompt: Prompt, may_wait: bool) -> bool:
        """Ask the remote store; whether the match can be made now."""
        with self.server.lock, self.server.session() as tasks:
            lookups = tasks.look_up(prompt, time.monotonic(), self.ids.session)
        if not lookups or not may_wait:
            return not lookups
        # On the server's condition: the caller's thread has nothing else to do.
        with self.server.lock, self.server.session() as tasks:
            while any(map(tasks.queries.is_looking_up, lookups)):
                self.server.state.changed.wait()  # it has a deadline
                if self.server.stopping:
                    raise ClosedError("the cache was shut down")
        return True

    def launch(
        self, task_ids: Sequence[int], gpu_blocks: Sequence[npt.NDArray[np.int64]], gated: bool
    ) -> None:
        with self.server.lock, self.server.session() as tasks:
            tasks.launch([TaskId(t) for t in task_ids], gpu_blocks, time.monotonic(), gated)

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a get that the engine has its ranks carry out, if that can be promised."""
        with self.server.lock, self.server.session() as tasks:
            return tasks.promise(TaskId(task_id), time.monotonic())

    def cancel(self, task_ids: Sequence[int]) -> None:
        with self.server.lock, self.server.session() as tasks:
            tasks.cancel([TaskId(t) for t in task_ids], time.monotonic())

    def report_prefill(self, blocks_per_s: float) -> None:
        if not self.server.is_open:
            return
        with self.server.lock, self.server.session() as tasks:
            tasks.report_prefill(self.ids.session, blocks_per_s)

    def session_hint(self, session_id: str, over: bool, returns_in_s: float | None) -> bool:
        """Act on what a user says of its session; whether the session is known."""
        if not self.server.is_open:
            return False
        with self.server.lock, self.server.session() as tasks:
            return tasks.session_hint(session_id, over, returns_in_s, time.monotonic())

    def control(self, call: CacheCall) -> Any:
        """Carry out a user's call about what is cached."""
        return self.server.control(call, self.ids.session)


_NAME = "operator"
_RUNS_AT_ONCE = 4096


class Operator:
    """Thread-safe. `clear` and `prefetch` raise `ClosedError` once the server has stopped."""

    def __init__(self, server: KVServer) -> None:
        self._server = server
        self._session: LocalSession | None = None
        self._opening = threading.Lock()

    def stats(self) -> Stats:
        return self._server.stats()

    def lately(self) -> Lately:
        """Return what the figures do not tell: minutes, sessions, peers, warnings."""
        server = self._server
        with server.lock:
            told = Lately(time=time.time(), events=noted_events())
            if server.peers is not None:
                told.peers = server.peers.lines()
            if (cache := server.hub.cache) is not None:
                told.minutes = cache.tasks.accounts.hits_by_minute(time.monotonic())
                told.sessions = cache.tasks.cache.sessions.active_lately()
            return told

    def health(self) -> dict[str, Any]:
        """``serving``, and ``missing``: workers, ranks and observers that are away."""
        return self._server.health()

    def clear(self, tier: str | None) -> int:
        """Drop the blocks of one tier, or of all, that are not in use; how many.

        Raises:
            ValueError: There is no such tier.
            RegistrationError: The model is not known yet.
        """
        self._require_cache()
        return self._server.clear(tier)

    def prefetch(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None = None,
        block_hash: int | None = None,
    ) -> int:
        """Bring what lower tiers have of a prompt to DRAM. Does not wait for it.

        Args:
            token_ids: The prompt; or instead ``block_keys``, as its engine hashes it; or
                ``block_hash``, by which KV events named its last block below DRAM.

        Returns:
            How many of its blocks are being loaded: those that DRAM has already do not count. If
            engines have different weights, those of each.

        Raises:
            ValueError: Not exactly one of the three is given, or it makes no sense.
            RegistrationError: The model is not known yet.
        """
        cache = self._require_cache()
        if sum(each is not None for each in (token_ids, block_keys, block_hash)) != 1:
            raise ValueError("give one of token_ids, block_keys and block_hash")
        # Engines with different weights have stored the same tokens under different names.
        if block_hash is None:
            prompts, _ = self._prompts(token_ids, block_keys, namespace)
        else:
            # What an event has named is of one version already.
            keys = self._find_published(cache, block_hash)
            if keys is None:
                return 0
            num_tokens = keys.num_blocks * cache.config.tokens_per_block
            prompts = [Prompt(TaskKind.PREFETCH, keys, 0, keys.num_blocks, num_tokens)]
        session, num_loading = self._open_session(), 0
        for prompt in prompts:
            task = session.match(prompt)
            assert task is not None  # it may wait
            if task.num_blocks:
                session.launch([task.task_id], [np.empty(0, np.int64)], gated=False)
            num_loading += task.num_blocks - task.sources.get(TierName.CPU, 0)
        return num_loading

    def lookup(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None = None,
    ) -> dict[str, int]:
        """Return how many tokens from its start each tier could supply of a prompt
        (`KVManager.lookup`).

        If engines have different weights, what it could supply to the one it has most for.

        Raises:
            ValueError: Not exactly one of the two is given, or it makes no sense.
            RegistrationError: The model is not known yet.
        """
        prompts, _ = self._prompts(token_ids, block_keys, namespace)
        tokens: dict[str, int] = self._control(CacheCall(name="lookup", prompts=prompts))
        return tokens

    def pin(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None = None,
        session_id: str | None = None,
        *,
        ttl_s: float,
    ) -> Pin | None:
        """Keep a prompt or a session from eviction for a time (`KVManager.pin`).

        If engines have different weights, what is cached of the prompt for any of them.

        Raises:
            ValueError: Neither a prompt nor a session is given, or it makes no sense.
            RegistrationError: The model is not known yet.
        """
        prompts, engines = self._prompts(token_ids, block_keys, namespace)
        if session_id is not None and not prompts and namespace is not None:
            raise ValueError("a session is pinned whole: leave out namespace")
        call = CacheCall(
            name="pin", prompts=prompts, engines=engines, session_id=session_id, ttl_s=ttl_s
        )
        pin: Pin | None = self._control(call)
        return pin

    def unpin(self, pin_id: str) -> bool:
        """End a pin; whether there was one.

        Raises:
            RegistrationError: The model is not known yet.
        """
        return bool(self._control(CacheCall(name="unpin", pin_id=pin_id)))

    def delete(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None = None,
        session_id: str | None = None,
    ) -> dict[str, int]:
        """Delete a prompt, a session's prompts or a namespace (`KVManager.delete`).

        Raises:
            ValueError: Not exactly one of them is given, or it makes no sense.
            RegistrationError: The model is not known yet.
            StorageError: As of `KVManager.delete`.
        """
        prompts, _ = self._prompts(token_ids, block_keys, namespace, is_strict=True)
        tenant, roots = None, list[RootId]()
        if not prompts and namespace is not None:
            cache = self._require_cache()
            for naming in self._namings():
                tenant, named = _maker(cache, naming).roots(namespace)
                roots += named
        call = CacheCall(
            name="delete", prompts=prompts, session_id=session_id, tenant=tenant, roots=roots
        )
        blocks: dict[str, int] = self._control(call)
        return blocks

    def _control(self, call: CacheCall) -> Any:
        self._require_cache()
        return self._server.control(call)

    def drain(self, to: str, seconds: float, num_bytes: int | None = None) -> None:
        """Begin to hand what DRAM has to a peer, which reads it, hottest first.

        Args:
            to: The peer's ``peer_endpoint``.
            seconds: How long it may take.
            num_bytes: How much may be moved; None for all.

        Raises:
            ValueError: Another drain is under way, others may not read here, or it makes no sense.
            RegistrationError: The model or its layout is not known yet.
        """
        cache, peers = self._require_cache(), self._server.peers
        if peers is None or peers.listen_fd < 0:
            raise ValueError("others may not read here: set peer_endpoint")
        if not (0 < seconds < math.inf and (num_bytes is None or num_bytes > 0)):
            raise ValueError("seconds and bytes must be above 0")
        if not to.startswith("tcp://") or not split_tcp(to)[1]:
            raise ValueError(f"{to!r}: must be a peer_endpoint, tcp://HOST:PORT")
        if cache.layout is None:
            raise RegistrationError("no engine has said yet how it lays out its blocks")
        with self._server.lock, self._server.session() as tasks:
            blocks = HotBlocks(tasks.cache, tasks.loans.is_shared)
        # In parts, since engines wait for the lock.
        is_more = True
        while is_more:
            with self._server.lock, self._server.session():
                is_more = blocks.gather(_RUNS_AT_ONCE)
        blocks.sort()
        size = cache.shards.block_bytes
        most = math.inf if num_bytes is None else num_bytes / size
        with self._server.lock, self._server.session():
            peers.begin_drain(Drain(to, peers.id, blocks, size, seconds, most))

    def drain_progress(self, stop: bool = False) -> DrainProgress | None:
        """Return how the last drain goes, or has ended; None if there was none.

        Args:
            stop: Whether to ask the peer for nothing more.
        """
        with self._server.lock:
            drain = None if self._server.peers is None else self._server.peers.drain
            if drain is None:
                return None
            if stop:
                drain.stop()
            return msgspec.structs.replace(drain.progress)

    def _prompts(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None,
        is_strict: bool = False,
    ) -> tuple[list[Prompt], list[list[str]]]:
        """Make a prompt, if one is given, under each name that engines have for it; and return the
        engines that do.

        Args:
            is_strict: Whether one name that cannot be made is an error.
        """
        cache = self._require_cache()
        if token_ids is not None and block_keys is not None:
            raise ValueError("give either token_ids or block_keys")
        if token_ids is None and block_keys is None:
            return [], []
        # All of them: who asks by HTTP knows neither, and means the text.
        prompts, engines, error = list[Prompt](), list[list[str]](), None
        for naming, names in self._namings().items():
            try:
                prompts.append(_prompt(cache, token_ids, block_keys, namespace, naming))
                engines.append(names)
            except ValueError as problem:  # a hash that cannot be made here, say
                error = problem
        if error is not None and (is_strict or not prompts):
            raise error
        return prompts, engines

    def session_hint(
        self, session_id: str, over: bool = False, returns_in_s: float | None = None
    ) -> bool:
        """Act on what a user says of its session; whether the session is known.

        Raises:
            ValueError: It makes no sense.
            RegistrationError: The model is not known yet.
        """
        check_hint(session_id, over, returns_in_s)
        self._require_cache()
        return self._open_session().session_hint(session_id, over, returns_in_s)

    def new_weights(self, version: str | None = None, client: str | None = None) -> str:
        """Name the weights of an engine; return the version.

        Raises:
            ValueError: There is no such engine, or it cannot be a version.
            AmbiguousEngineError: Several engines are attached, and none is named.
            RegistrationError: No engine is attached.
        """
        if version is not None:
            check_version(version)
        engines = self._engines()
        if not engines:
            raise RegistrationError("no engine is attached")
        there = ", ".join(map(repr, engines))
        if client is None and len(engines) > 1:
            raise AmbiguousEngineError(f"say which engine by client, one of {there}")
        if client is not None and client not in engines:
            raise ValueError(f"client = {client!r}: no such engine here; there are {there}")
        return self._server.new_weights(client or engines[0], version or random_version()).version

    def _engines(self) -> list[str]:
        """Names of the engines in session."""
        with self._server.lock:
            return [name for name, _, _ in self._server.state.engines_in_session()]

    def _namings(self) -> dict[_Naming, list[str]]:
        """How engines in session name prompts, with the engines; and how those before would have,
        under the same names of the weights, or without any under the configured one."""
        found: dict[_Naming, list[str]] = {}
        with self._server.lock:
            state = self._server.state
            for name in self._engines():
                naming = _Naming(state.weights.of(name).version, state.engine_keys.get(name))
                found.setdefault(naming, []).append(name)
            before = set(state.engine_keys.values()) or {None}
        versions: dict[str, list[str]] = {}
        for naming, names in found.items():
            versions.setdefault(naming.version, []).extend(names)
        versions = versions or {self._server.config.model_version or "": []}
        for (version, names), how in itertools.product(versions.items(), before):
            found.setdefault(_Naming(version, how), names)
        return found

    def _find_published(self, cache: ServedCache, block_hash: int) -> IndexedKeys | None:
        """Return the prefix that ends with a block below DRAM, by its hash in KV events."""
        if cache.published is None:
            raise ValueError("block_hash: this cache publishes no KV events")
        with self._server.lock, self._server.session() as tasks:
            block = cache.published.find(low_64_bits(block_hash))
            return None if block is None else find_prefix(*block, tasks.cache.tiers)

    def _open_session(self) -> LocalSession:
        # Requests come on several threads.
        with self._opening:
            if self._session is None:
                self._session = LocalSession(self._server)
                with self._server.lock:
                    self._session.ids = self._server.state.open_local(_NAME)
            return self._session

    def _require_cache(self) -> ServedCache:
        cache = self._server.cache
        if cache is None:
            raise RegistrationError("no engine has said yet what is cached here")
        return cache


class _Naming(NamedTuple):
    """What engines call their weights, and how they make keys."""

    version: str
    engine_keys: EngineKeys | None


def _maker(
    cache: ServedCache, naming: _Naming, detail: PromptDetail = PromptDetail.NOTHING
) -> PromptMaker:
    size = cache.config.tokens_per_block
    return PromptMaker(cache.fingerprint, size, lambda: detail, *naming)


def _prompt(
    cache: ServedCache,
    token_ids: Sequence[int] | None,
    block_keys: Sequence[bytes] | None,
    namespace: str | Sequence[str] | None,
    naming: _Naming,
) -> Prompt:
    """A prompt as it comes by HTTP: lists of anything."""
    # Made as engines make theirs (`cache.prompt`), so that it finds what they have stored.
    detail = PromptDetail.NOTHING if token_ids is None else PromptDetail.TOKENS
    if any(not 0 < len(key) <= MAX_KEY_BYTES for key in block_keys or ()):
        raise ValueError(f"block_keys must have 1 to {MAX_KEY_BYTES} bytes each")
    options: PromptName = {"namespace": namespace, "block_keys": block_keys}
    try:
        tokens = None if token_ids is None else np.array(token_ids, dtype=np.int64)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: {error}") from None
    [prompt] = _maker(cache, naming, detail).named(tokens, options, TaskKind.PREFETCH)
    return prompt


def open_http(server: KVServer) -> HttpService:
    """Serve it at its ``http_endpoint``. See `server.http`, whose packages are an extra.

    Raises:
        ConfigError: The address cannot be used.
        MissingDependencyError: A package is not installed.
    """
    from flexcache.server.http import HttpService

    assert server.config.http_endpoint is not None
    service = HttpService(Operator(server), server.config.http_endpoint, server.config.http_token)
    service.start()
    return service
