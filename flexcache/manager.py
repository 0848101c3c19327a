"""KVManager: the interface for an engine's scheduler. Tokens outside, blocks inside."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flexcache.cache.control import CacheCall, Pin
from flexcache.cache.journal import Change
from flexcache.cache.prompt import (
    Mask,
    Prompt,
    PromptMaker,
    PromptName,
    PromptOptions,
    Span,
    Tokens,
    check_hint,
    check_version,
    random_version,
    retention_s,
)
from flexcache.client import arguments
from flexcache.client.arguments import (
    NO_BLOCKS,
    BlockIds,
    GroupBlocks,
    GroupTable,
    Slots,
    as_slots,
    gpu_blocks,
    matched_slots,
)
from flexcache.client.tasks import ClientTasks, StepPromises
from flexcache.client.transport import open_transport
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.values import with_engine
from flexcache.errors import ClosedError, ServerLostError
from flexcache.ids import KVStatus, PromptDetail, RootId, TaskKind, TierName
from flexcache.processes import tell_of_forks
from flexcache.tasks.instructions import Offer, PromisedLoad, TaskResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NOT_STARTED = "the cache was not started: call start() first"


@dataclass(frozen=True, eq=False)
class KVResponse:
    """Outcome of a task.

    Attributes:
        status: SUCCESS if anything arrived, for a get possibly less than was matched.
        mask: Over the prompt's tokens: True where KV arrived (get) or was stored (put). Read-only.
        error: What went wrong, even if part of the task succeeded.
    """

    status: KVStatus
    mask: Mask
    error: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVResponse):
            return NotImplemented
        same = (self.status, self.error) == (other.status, other.error)
        return same and np.array_equal(self.mask, other.mask)


class KVManager:
    """The KV cache of one engine: in this process, or in a server that engines share.

    It is shared if an ``endpoint`` is given (here or in the config) or ``dp_size > 1``. Without a
    server at the endpoint, the engine of rank 0 starts one with the config's sizes.

    Args:
        model_config: Shape of the model's KV.
        cache_config: Sizes and policies of the tiers. Needs no size if an ``endpoint`` is given.
        endpoint: Address of the shared server, or the `endpoint` of another engine there; by
            default, all ranks of one ``engine_id`` and ``dp_size > 1`` find the same private one.
        dp_rank: The engine's data-parallel rank, below the model's ``dp_size``. With an
            ``endpoint`` a model whose ``dp_size`` is 1 may be one of more.
        engine_id: Distinguishes engines at one server; by default a new id. `endpoint` passes it
            to the engine's `KVTPClient`s; those that connect otherwise must be given the same id.

    Thread-safe. A match reserves what it promises: launch it or cancel it. If its server is away,
    a shared cache answers every match with a miss at once.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        *,
        endpoint: str | None = None,
        dp_rank: int = 0,
        engine_id: str = "",
    ) -> None:
        arguments.check_manager(model_config, cache_config, endpoint, dp_rank, engine_id)
        logging.getLogger("flexcache").setLevel(cache_config.log_level)
        self.model_config = model_config = model_config.in_shards(cache_config.store_shards)
        self.cache_config = cache_config
        self.dp_rank = dp_rank
        if endpoint is None:
            cache_config.check_has_tier()
        self._transport, self._engine_id = open_transport(
            model_config, cache_config, endpoint or cache_config.endpoint, engine_id, dp_rank
        )
        self._promises = StepPromises(model_config.num_ranks)
        self._tasks = ClientTasks()
        self._closed: str | None = _NOT_STARTED
        """Why there is no cache; None while there is one."""
        self._pid = os.getpid()
        self._is_parents = False
        """Whether this process is a child of the one whose cache it is."""
        size = cache_config.tokens_per_block
        self._groups = GroupTable(model_config, size)
        self._prompts = PromptMaker(
            model_config.fingerprint(size), size, lambda: self._transport.prompt_detail,
            cache_config.model_version or "", model_config.engine_keys,
        )  # fmt: skip
        # Called on any thread, before the first match that counts for the new generation.
        self._tasks.renamed = self._prompts.rename

    @property
    def endpoint(self) -> str:
        """Address for the engine's `KVTPClient`s: the server, and the engine's name there."""
        return with_engine(self._transport.endpoint, self._engine_id)

    @property
    def weights_generation(self) -> int:
        """Counts how often the weights got another name. Note it when a request begins, and pass it
        as ``weights``: KV that was computed across a change is then stored under no name."""
        return self._prompts.generation

    @property
    def wants_request_info(self) -> bool:
        """Whether KV events or traces are on: only then does a ``request_info`` have an effect."""
        return self._transport.prompt_detail is not PromptDetail.NOTHING

    def start(self) -> None:
        """Start serving; returns at once. `wait_ready` waits for the ranks.

        Raises:
            ClosedError: It was shut down.
        """
        if self._closed not in (None, _NOT_STARTED):
            raise ClosedError(self._closed)
        self._pid = os.getpid()
        tell_of_forks(self)
        self._transport.start(self._tasks)
        if self._closed is _NOT_STARTED:  # else it was shut down meanwhile
            self._closed = None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait for all ranks and workers.

        Raises:
            TimeoutError: Not all have registered; the message names those missing.
            RegistrationError: A rank was refused; the message says why.
        """
        limit_s = arguments.wait_s(timeout)
        self._require_open()
        self._transport.wait_ready(limit_s)

    def is_ready(self) -> bool:
        return not self._is_parents and self._transport.is_ready()

    # -- match and launch ------------------------------------------------------------------------

    def get_match(
        self, token_ids: Tokens, token_mask: Span | None = None, **options: Unpack[PromptOptions]
    ) -> tuple[int, Mask]:
        """Find the longest cached prefix and reserve it for a load. With window or state groups, it
        ends where what they need is cached too.

        Args:
            token_ids: The prompt, 1-D.
            token_mask: True where the caller needs KV, after a prefix that it has; or the `range`
                of these tokens, which is cheaper. Only whole blocks count.
            options: What else is known of the prompt: see `PromptOptions`.

        Returns:
            A task id, and a mask over the tokens: True where FlexCache will supply KV. Masks share
            memory and are read-only; torch needs a copy.
        """
        prompt = self._prompts.make(TaskKind.GET, token_ids, token_mask, **options)
        offer = self._match(self._groups.loadable(prompt))
        return offer.task_id, self._mask(offer)

    def get_match_by_tier(
        self, token_ids: Tokens, token_mask: Span | None = None, *,
        look_up: bool | Literal["only"] = True, awaits_loads: bool = False,
        **options: Unpack[PromptOptions],
    ) -> tuple[int, Mask, dict[TierName, int]] | None:  # fmt: skip
        """Run `get_match` without waiting, and also return how many tokens each tier will supply.

        Returns None if the remote store has not answered yet: call again a little later, and
        without ``look_up`` after ``remote_lookup_timeout_s``. With ``look_up="only"`` the store is
        asked ahead of a later match: nothing is reserved, and None is returned. With
        ``awaits_loads`` None is also returned while a prefetch brings what the prompt needs, but no
        longer than computing it would take.
        """
        arguments.check_look_up(look_up, awaits_loads)
        prompt = self._prompts.make(TaskKind.GET, token_ids, token_mask, **options)
        prompt = self._groups.loadable(prompt)
        if look_up == "only":
            self._require_open()
            self._transport.look_up(prompt)
            return None
        offer = self._match_nowait(prompt, look_up, awaits_loads)
        if offer is None:
            return None
        size = self._prompts.tokens_per_block
        sources = {tier: count * size for tier, count in offer.sources.items()}
        return offer.task_id, self._mask(offer), sources

    def num_shared(self, task_id: int) -> int:
        """Return how many tokens, from its prompt's start, a matched get has in common with what is
        cached. In a model with window or state groups that may be more than its hit covers: the hit
        ends where their tail was stored, and this where another prompt goes on differently.

        Raises:
            KeyError: The id was never issued.
        """
        [task_id] = arguments.ids_of([task_id])
        return self._tasks.offer(task_id).num_cached * self._prompts.tokens_per_block

    def put_match(
        self, token_ids: Tokens, token_mask: Span | None = None, *, priority: int = 0,
        ttl_s: float = 0.0, store: bool = True, max_store_tokens: int | None = None,
        tail_at: int | None = None, **options: Unpack[PromptOptions],
    ) -> tuple[int, Mask]:  # fmt: skip
        """Find the part of a prompt that is not cached yet and reserve room for it.

        The mask returned is True where KV will be copied, and False where it is cached, on its way,
        or does not fit. Arguments as for `get_match`; ``token_mask`` is True where KV is offered.
        Without its ``parent_key`` in DRAM a continuation is not stored.

        Args:
            priority: Each step counts as a use an hour later when room is needed;
                negative steps make the prompt's blocks go first.
            ttl_s: Prefer to keep for this many seconds. Best effort, not a pin.
            store: Whether anything is kept of what the prompt's sender calls private, say. What is
                cached already stays.
            max_store_tokens: Keep at most the first so many of ``token_ids``, in whole blocks.
            tail_at: Also store what window and state groups need to resume after this many tokens.
                Launch the task even if the mask is all False: the tail may be missing. If it is
                not, the launch does nothing.
        """
        retain_s = retention_s(priority, ttl_s)
        prompt = self._prompts.make(TaskKind.PUT, token_ids, token_mask, retain_s, **options)
        prompt = self._groups.with_tail(prompt, tail_at)
        offer = self._match(self._groups.kept(prompt, store, max_store_tokens))
        return offer.task_id, self._mask(offer)

    def get_async(
        self, token_ids: Tokens, slot_mapping: Slots, token_mask: Span | None = None,
        **options: Unpack[PromptOptions],
    ) -> tuple[int, Mask]:  # fmt: skip
        """Combine `get_match` and `launch`.

        ``slot_mapping`` has a slot for each token needed (in ``token_mask``, or all), or only
        for those that match.
        """
        self._groups.require_slots("get_match")
        prompt = self._prompts.make(TaskKind.GET, token_ids, token_mask, **options)
        return self._match_and_launch(prompt, slot_mapping, token_mask)

    def put_async(
        self, token_ids: Tokens, slot_mapping: Slots, token_mask: Span | None = None, *,
        priority: int = 0, ttl_s: float = 0.0, store: bool = True,
        max_store_tokens: int | None = None, **options: Unpack[PromptOptions],
    ) -> tuple[int, Mask]:  # fmt: skip
        """Combine `put_match` and `launch`; ``slot_mapping`` as for `get_async`."""
        self._groups.require_slots("put_match")
        retain_s = retention_s(priority, ttl_s)
        prompt = self._prompts.make(TaskKind.PUT, token_ids, token_mask, retain_s, **options)
        prompt = self._groups.kept(prompt, store, max_store_tokens)
        return self._match_and_launch(prompt, slot_mapping, token_mask)

    def prefetch_async(
        self, token_ids: Tokens, token_mask: Span | None = None, **options: Unpack[PromptOptions]
    ) -> int:
        """Load the blocks of a prompt from lower tiers into DRAM. Needs no GPU slots."""
        prompt = self._prompts.make(TaskKind.PREFETCH, token_ids, token_mask, **options)
        offer = self._match(self._groups.loadable(prompt))
        self._launch([offer.task_id], [NO_BLOCKS], gated=False)
        return offer.task_id

    def prefetch_nowait(
        self, token_ids: Tokens, token_mask: Span | None = None, **options: Unpack[PromptOptions]
    ) -> int | None:
        """Run `prefetch_async` without waiting. Returns None if the remote store has not answered
        yet: call again a little later."""
        prompt = self._prompts.make(TaskKind.PREFETCH, token_ids, token_mask, **options)
        offer = self._match_nowait(self._groups.loadable(prompt), True, False)
        if offer is None:
            return None
        self._launch([offer.task_id], [NO_BLOCKS], gated=False)
        return offer.task_id

    def _match(self, prompt: Prompt) -> Offer:
        """Make a task for what can be done of a prompt. Waits for the remote store's answer."""
        self._require_open()
        offer = self._transport.match(prompt, True, True, False)
        assert offer is not None  # it may wait
        self._tasks.add(offer)
        return offer

    def _match_nowait(self, prompt: Prompt, look_up: bool, awaits_loads: bool) -> Offer | None:
        """As `_match`, but None if the remote store is asked (``look_up``) and has yet to answer,
        or (``awaits_loads``) while what a get needs is being loaded early."""
        self._require_open()
        offer = self._transport.match(prompt, look_up, False, awaits_loads)
        if offer is not None:
            self._tasks.add(offer)
        return offer

    def _match_and_launch(
        self, prompt: Prompt, slot_mapping: Slots, token_mask: Span | None
    ) -> tuple[int, Mask]:
        """Match, and launch with the slots of what matched; cancel if those are wrong."""
        slots, size = as_slots(slot_mapping, "slot_mapping"), self._prompts.tokens_per_block
        offer = self._match(prompt)
        mask = self._mask(offer)
        try:
            blocks = gpu_blocks(matched_slots(slots, mask, token_mask), size, "slot_mapping")
            self._launch([offer.task_id], [blocks], gated=False)
        except ValueError:
            self.cancel([offer.task_id])
            raise
        return offer.task_id, mask

    def launch(
        self, task_ids: Sequence[int], slot_mappings: Sequence[Slots] = (), *,
        group_blocks: Sequence[GroupBlocks] | None = None, gated: bool = False,
    ) -> None:  # fmt: skip
        """Start matched tasks.

        Args:
            slot_mappings: For each task, one GPU slot per True token of its mask, in order.
            group_blocks: Instead, for each task and each group (a model without groups has one) the
                ids of its GPU blocks, in order: of a full-attention group those of the True tokens;
                of any other `KVGroup.num_needed` up to the end of the hit, or to ``tail_at`` of a
                put; of a get, -1 for those not wanted. Models with groups need them.
            gated: Delay copies to and from the GPU until each rank opens the gate
                (`KVTPClient.open_gates`).

        Raises:
            ValueError: A length is wrong, slots are not whole blocks, or a task was launched
                before. None is started in this case.
            KeyError: An id was never issued.
        """
        arguments.check_flag("gated", gated)
        task_ids = arguments.ids_of(task_ids)
        offers = map(self._tasks.offer, task_ids)
        blocks = self._groups.gpu_blocks(slot_mappings, group_blocks, offers)
        self._launch(task_ids, blocks, gated)

    def _launch(self, task_ids: Sequence[int], blocks: Sequence[BlockIds], gated: bool) -> None:
        positions = self._tasks.launch(task_ids, blocks)
        if positions:
            self._transport.launch(
                [task_ids[i] for i in positions], [blocks[i] for i in positions], gated
            )

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a matched get, instead of launching it, for a step that cannot do without it.

        The engine hands the promise to each rank with that step (`KVTPClient.load_promised`). Until
        `end_promises` the load cannot be lost: not by the end of the server or the session, a
        change of the weights, or a rank that leaves. One that no rank was given must be cancelled:
        its blocks stay leased. Wait for it only after `end_promises`.

        Returns:
            None if it cannot be promised, and is to be launched: not all its blocks are in DRAM,
            it has an adapter or the model groups, a rank is not ready, or the server is away.

        Raises:
            KeyError: The id was never issued.
        """
        [task_id] = arguments.ids_of([task_id])
        if self.model_config.groups:
            return None
        self._require_open()
        try:
            if not self._promises.begin(self._transport.fence_path):
                return None
            promised = self._transport.promise(task_id)
        except ServerLostError:
            return None
        if promised is not None:
            self._tasks.promised(task_id)
        return promised

    def end_promises(self) -> None:
        """Say that every step that was given a promised load has ended, and no other get is
        promised. Idempotent."""
        self._promises.end()

    def report_prefill(self, tokens_per_s: float) -> None:
        """Report how fast the engine computes prompts, as ``skip_slow_loads`` requires."""
        rate = arguments.positive("tokens_per_s", tokens_per_s)
        self._require_open()
        self._transport.report_prefill(rate / self._prompts.tokens_per_block)

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Stop what has not started. Idempotent; does not change tasks that have ended."""
        are_open = self._tasks.cancel(arguments.ids_of(task_ids))
        if are_open:
            self._transport.cancel(are_open)

    # -- responses -------------------------------------------------------------------------------

    def wait(
        self, task_ids: Iterable[int], timeout: float | None = None, completely: bool = False
    ) -> dict[int, KVResponse]:
        """Wait until the GPU side of the tasks is done, so that their slots can be reused.

        Args:
            timeout: Seconds; the response for a task not done by then is TIMEOUT, and it continues.
            completely: Wait for everything, including write-through to lower tiers.
        """
        all_ids = arguments.ids_of(task_ids)
        results = self._tasks.results(all_ids, arguments.wait_s(timeout), completely)
        late = KVResponse(KVStatus.TIMEOUT, np.zeros(0, np.bool_), f"not done within {timeout} s")
        return {
            task_id: self._response(results[task_id]) if task_id in results else late
            for task_id in all_ids
        }

    def try_wait(self, task_ids: Iterable[int]) -> dict[int, KVResponse]:
        """Return the responses of those tasks whose GPU side is done."""
        results = self._tasks.results(arguments.ids_of(task_ids), 0.0, completely=False)
        return {task_id: self._response(result) for task_id, result in results.items()}

    # -- the cache as a whole, and users' sessions -------------------------------------------------

    def session_hint(
        self, session_id: str, *, over: bool = False, returns_in_s: float | None = None
    ) -> None:
        """Say how a user's session goes on: it is over, or it returns. Nothing is lost by a hint.

        An unknown session is counted, not an error: its blocks may all be evicted.

        Args:
            session_id: As its gets and puts name it.
            over: It is over: what no other session has used is evicted first.
            returns_in_s: It goes on in about this many seconds, 0 to 86,400: prefer to keep its
                blocks until then, and have those of its last prompt in DRAM by then.

        Raises:
            ValueError: An argument is out of range, or not exactly one of the two is given.
            ServerLostError: The cache is shared and its server is away.
        """
        check_hint(session_id, over, returns_in_s)
        seconds = None if returns_in_s is None else float(returns_in_s)
        self._require_open()
        self._transport.session_hint(session_id, over, seconds)

    def lookup(
        self, token_ids: Tokens | None = None, **options: Unpack[PromptName]
    ) -> dict[str, int]:
        """Return how many tokens, from the prompt's start, each tier could supply; 0 if it is
        unavailable. Nothing is reserved, and it is no use of the blocks. Of the remote store counts
        what is known here; it is not asked.

        Args:
            token_ids: The prompt, 1-D; with ``block_keys`` it may be left out.
            options: What else the prompt's keys depend on: see `PromptName`.

        Raises:
            ValueError: An argument has the wrong shape, type or size.
            ServerLostError: The cache is shared and its server is away.
        """
        call = CacheCall(name="lookup", prompts=self._prompts.named(token_ids, options))
        tokens: dict[str, int] = self._control(call)
        return tokens

    def pin(
        self, token_ids: Tokens | None = None, *, ttl_s: float, session_id: str | None = None,
        **options: Unpack[PromptName],
    ) -> Pin | None:  # fmt: skip
        """Keep what is cached of a prompt, or of a session's prompts, from eviction for a time.

        It holds what is cached now, in DRAM or else on SSD. It ends with its time, by `unpin`,
        `delete`, `clear` or `reset`, with the weights' name, and with the server. The same call
        again extends it, to what is cached then, too.

        Args:
            token_ids: The prompt, as for `lookup`; so are the options.
            ttl_s: Seconds, at most a week. A pin that holds already never ends earlier by this.
            session_id: Instead, all prompts that the session has used whose ends are cached. With a
                prompt, the session whose deletion ends the pin.

        Returns:
            None if nothing is cached, or there is no room: pins together hold at most
            ``max_pinned_share`` of a tier, and those of a namespace its quota.

        Raises:
            ValueError: An argument is out of range, or neither prompt nor session is given.
            ServerLostError: The cache is shared and its server is away.
        """
        prompts = self._prompts.named(token_ids, options)
        if session_id is not None and not prompts and options.get("namespace") is not None:
            raise ValueError("a session is pinned whole: leave out namespace")
        call = CacheCall(name="pin", prompts=prompts, session_id=session_id, ttl_s=ttl_s)
        pinned = self._control(call)
        return None if pinned is None else Pin(*pinned)

    def unpin(self, pin_id: str) -> bool:
        """End a pin before its time; False if there is none of this id any more."""
        return bool(self._control(CacheCall(name="unpin", pin_id=pin_id)))

    def delete(
        self, token_ids: Tokens | None = None, *, session_id: str | None = None,
        **options: Unpack[PromptName],
    ) -> dict[str, int]:  # fmt: skip
        """Delete what is cached of a prompt, of a session's prompts, or of a namespace, for good.

        Of a prompt goes what continues it, and its own blocks from its end back to the first one
        that another prompt continues from. Of a session goes what it has stored, but for what
        another session, or a prompt without one, has used. What pins of others hold stays.

        Nothing new finds the blocks from now on, in any tier, also after a restart. Tasks that read
        them from DRAM or SSD end well; what is still being stored of them is dropped. In a remote
        store objects are removed that this server knows, best effort.

        Args:
            token_ids: The prompt, as for `lookup`; so are the options.
            session_id: Instead of a prompt, all prompts of the session.
            options: A ``namespace`` alone: a string, the tenant with all its namespaces and names
                of weights; several parts, that one under the present weights. Its pins end.

        Returns:
            Blocks that went, by tier; units of tails count as blocks.

        Raises:
            ValueError: An argument is of a wrong type, or not exactly one of prompt, session and
                namespace is given.
            ServerLostError: The cache is shared and its server is away.
            StorageError: It is not found any more, but a restart may bring back what was on SSD.
        """
        prompts = self._prompts.named(token_ids, options)
        tenant, roots = None, list[RootId]()
        if not prompts and options.get("namespace") is not None:
            adapter = options.get("adapter", "")
            tenant, roots = self._prompts.roots(options.get("namespace"), adapter)
        blocks: dict[str, int] = self._control(
            CacheCall(
                name="delete", prompts=prompts, session_id=session_id, tenant=tenant, roots=roots
            )
        )
        return blocks

    def _control(self, call: CacheCall) -> Any:
        call.check()
        self._require_open()
        return self._transport.control(call)

    def clear(self, tier: str) -> int:
        """Drop the unused blocks of one tier (`CPU`, `SSD`, `REMOTE`); return how many.

        A remote store keeps its objects, under names that this cache no longer uses: until its
        server restarts, this cache and others do not find each other's blocks there.
        """
        arguments.check_tier(tier)
        self._require_open()
        return self._transport.clear(tier)

    def reset(self) -> None:
        """Drop all blocks, and name what this engine stores from now on by a new version, as
        `new_weights` does: the weights may have changed.

        What is in use or being stored can no longer be found either, also after a restart. A remote
        store keeps its objects, as for `clear`.
        """
        self._require_open()
        self._transport.clear(None)

    def new_weights(self, version: str | None = None) -> str:
        """Name the weights of this engine: it stores and finds only what was stored under this
        version from now on, by itself or by others that start from the same model.

        Call it once the weights have changed. Ranks that notice it themselves
        (`KVTPClient.weights_changed`) have called it already; the version given last counts. What
        other versions have stored is not found, and evicted first. Open tasks are cancelled. The
        version that they have already changes nothing.

        Args:
            version: 1 to 256 characters; None for one that no one else has.

        Returns:
            The version.

        Raises:
            ValueError: The version is no such string.
        """
        if version is not None:
            check_version(version)
        if self._is_parents:  # a thread that this process does not have may hold its locks
            self._require_open()
        version = version or random_version()
        self._transport.new_weights(version)  # also before the start, and without its server
        return version

    def take_changes(self) -> list[Change]:
        """Return what the tiers stored and lost since the last call, in order, with ``kv_events``.

        Empty if the cache is shared: its server publishes the changes (``kv_events_endpoint``).
        """
        return [] if self._is_parents else self._transport.take_changes()

    def stats(self) -> dict[str, Any]:
        """Return counters and occupancy, as plain dicts of numbers and strings.

        ``engine`` counts this engine's share, everything else all engines that share the cache.

        Raises:
            ServerLostError: The cache is shared and its server is away.
        """
        self._require_open()
        return self._transport.stats()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. Checks only block counts in a shared
        cache: walking the blocks would delay the other engines."""
        self._require_open()
        self._transport.check()

    def shutdown(self) -> None:
        """Cancel tasks, wait for running copies, stop the workers, free the memory. Idempotent, and
        the only call for a signal handler. `wait` raises at once; slots are free afterwards."""
        if self._is_parents:
            return
        self._closed = "the cache was shut down"
        self._promises.end()
        self._tasks.close()
        self._transport.close()

    def forked(self) -> None:
        """This process is a child of the one whose cache it is: only that may use it."""
        self._is_parents = True
        self._closed = (
            f"the cache is that of process {self._pid}, of which this one is a fork: "
            "make a KVManager of its own here"
        )
        self._tasks = ClientTasks()  # a thread that this process does not have may use the others
        self._tasks.close()

    def _require_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(self._closed)

    def _mask(self, offer: Offer) -> Mask:
        return self._prompts.token_mask(offer.num_tokens, offer.start, offer.num_blocks)

    def _response(self, result: TaskResult) -> KVResponse:
        mask = self._prompts.token_mask(result.num_tokens, result.start, result.num_ok)
        return KVResponse(result.status, mask, result.error)

    def __enter__(self) -> KVManager:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
