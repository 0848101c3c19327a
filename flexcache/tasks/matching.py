"""Matching of prompts against the cache: questions asked before, plans, and loads begun early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, repeat

import msgspec

from flexcache.cache.block_keys import LayoutRoots, PromptKeys
from flexcache.cache.control import CacheCall
from flexcache.cache.early_loads import EarlyLoad
from flexcache.cache.load_plan import AskedTail
from flexcache.cache.plan import EarlyTerms, Plan
from flexcache.cache.prompt import Prompt
from flexcache.cache.store_plan import DirectStores
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import IndexedKeys, find_chain
from flexcache.ids import BlockKey, HandOver, OpKind, RootId, SessionId, TaskKind, TierName
from flexcache.tasks.executors import Executors
from flexcache.tasks.instructions import PEER, Instruction
from flexcache.tasks.lookups import RemoteLookUps
from flexcache.tasks.model import Session, TaskSessions, load_patience_s
from flexcache.tasks.runner import TaskRunner

_FETCHES_A_TURN = 8  # other tasks go on between turns
_AHEAD_S = 3.0  # from when a prompt should have been computed until it is loaded
_LONGEST_WAIT_S = 3.0  # of a get, where it is not known how fast its engine computes
_GPU_OP_OF = {TaskKind.GET: OpKind.H2D, TaskKind.PUT: OpKind.D2H}


class Matcher:
    """Plans for prompts, under the layout that ranks have now.

    Args:
        runner: Carries out loads for sessions that return, and ends what has not begun.
        lookups: Open questions to peers and to the remote store, by who asks them.
        instructions: Receives `RunLookUp`.
        max_open_tasks: Limit for one session; beyond it a get is a miss and a put is dropped.
    """

    def __init__(
        self,
        cache: TieredCache,
        sessions: TaskSessions,
        executors: Executors,
        runner: TaskRunner,
        lookups: Mapping[str, RemoteLookUps],
        instructions: list[Instruction],
        max_open_tasks: int,
    ) -> None:
        self._cache = cache
        self._sessions = sessions
        self._executors = executors
        self._runner = runner
        self._lookups = lookups
        self._instructions = instructions
        self._max_open_tasks = max_open_tasks
        self._roots = LayoutRoots()
        if cache.loads.cost is not None:
            cache.loads.cost.blocks_ahead = executors.blocks_ahead

    @property
    def layout(self) -> bytes:
        """Under which blocks are kept."""
        return self._roots.layout

    def adopt_layout(self, layout: bytes) -> bool:
        """Keep blocks under this layout from now on; whether it is another one."""
        if layout == self._roots.layout:
            return False
        self._roots = LayoutRoots(layout)
        return True

    def _place(self, keys: PromptKeys, owner: Session | None) -> None:
        """Set the root that tiers keep a prompt under, which names the engine's present weights."""
        self._roots.place(keys)
        tiers = self._cache.tiers
        if tiers.beyond and owner is not None and owner.named_at == tiers.num_clears:
            for tier in tiers.beyond:
                tier.keep_plain(keys.root)

    def placed(self, owner: Session | None, call: CacheCall) -> CacheCall:
        """Return a user's call with its prompts and roots under the layout. What names former
        weights can only be deleted."""
        prompts = self._placed_prompts(owner, call)
        roots = [self._roots.placed(root) for root in call.roots]
        # Of a pin with a prompt it is the owner, and does not mean all of the session's.
        is_lost = call.name == "pin" and bool(call.prompts) and not prompts
        session_id = None if is_lost else call.session_id
        return msgspec.structs.replace(call, prompts=prompts, roots=roots, session_id=session_id)

    def _placed_prompts(self, owner: Session | None, call: CacheCall) -> list[Prompt]:
        own = () if owner is None else (owner.engine,)
        prompts: list[Prompt] = []
        for prompt, engines in zip(call.prompts, call.engines or repeat(own), strict=False):
            has_weights = self._has_weights(owner, prompt)
            if has_weights or call.name == "delete":
                self._place(prompt.keys, owner if has_weights else None)
                prompts.append(prompt)
                # As if they had matched it: what no engine names any more is retired, pins with it.
                for engine in engines if call.name == "pin" else ():
                    for session in self._sessions.of_engine(engine):
                        session.uses(prompt.keys.root)
        return prompts

    def look_up(self, owner: Session | None, prompt: Prompt, now: float) -> list[int]:
        """Ask peers and the remote store what they have of a prompt, where that may matter to a
        match.

        Returns:
            The questions to wait for.
        """
        if self._is_lost(prompt.hand_over):
            prompt = msgspec.structs.replace(prompt, hand_over=HandOver())
        keys, stop = prompt.keys, prompt.stop
        asked = self._asked(owner, prompt, now)
        if not asked:
            return []
        self._place(keys, owner)
        if keys.parent_key is not None:
            chain = find_chain(keys, self._cache.tiers)
            if chain is None:
                return []
            keys, stop = chain, stop + chain.num_before
            prompt = msgspec.structs.replace(prompt, keys=keys, stop=stop)
        tail_loads = self._cache.loads.tails
        if tail_loads is None and self._cache.tiers.have_locally(keys, stop):
            return []
        # The match searches again: the index may change before they have answered.
        questions = []
        for lookups in asked:
            tails: Sequence[AskedTail] = ()
            if tail_loads is not None:
                tails = tail_loads.unknown(keys, stop, now, lookups.tier)
                if not tails:
                    continue
            rate = 0.0 if owner is None else owner.prefill_blocks_per_s
            question = lookups.look_up(prompt, now, self._instructions, tails, rate)
            if question is not None:
                questions.append(question)
        return questions

    def _asked(self, owner: Session | None, prompt: Prompt, now: float) -> list[RemoteLookUps]:
        """Return those whose knowledge may matter to a prompt, and that would answer. While a peer
        computes it, that is the peer."""
        if prompt.kind is TaskKind.PUT or not self._has_weights(owner, prompt):
            return []
        up = [each for each in self._lookups.values() if self._executors.is_up(each.executor)]
        source = prompt.hand_over.source
        if prompt.hand_over.is_awaited_of_peer(now):
            up = [each for each in up if each.executor == PEER]
        # A peer that a request names may be one that has not been asked before.
        return [each for each in up if each.tier.can_be_asked or source]

    def _has_weights(self, owner: Session | None, prompt: Prompt) -> bool:
        return owner is None or self._sessions.has_weights(owner.engine, prompt.weights)

    def plan(self, owner: Session, prompt: Prompt) -> tuple[Prompt, Plan]:
        """Plan a task for a prompt. Return the prompt, too, or the whole chain that it continues.

        Without its parent a continuation stays one, and nothing is found for it.
        """
        has_weights = self._sessions.has_weights(owner.engine, prompt.weights)
        self._place(prompt.keys, owner if has_weights else None)
        if prompt.keys.parent_key is not None:
            prompt = self._resolve(owner, prompt)
        kind, keys = prompt.kind, prompt.keys
        if has_weights:
            if kind is not TaskKind.PREFETCH:  # an operator's, say, which computes with no weights
                owner.uses(keys.root)
                self._cache.tiers.unretire(keys.root)
            reason = self._why_not(owner, prompt)
        else:
            reason = "weights_changed"
        if reason is None:
            plan = self._plan(owner, prompt)
        else:
            plan = self._cache.plan_nothing(kind, keys, prompt.start, prompt.stop, reason)
        plan.num_before = prompt.num_before
        if kind is TaskKind.GET and prompt.start < prompt.stop and self._cache.reuse is not None:
            self._cache.reuse.looked_up(keys, plan, prompt.stop)
        return prompt, plan

    def _resolve(self, owner: Session, prompt: Prompt) -> Prompt:
        """Return the whole chain that a placed continuation continues; itself if none is found."""
        keys, kind, tiers = prompt.keys, prompt.kind, self._cache.tiers
        where: Iterable[Tier] = tiers
        if kind is TaskKind.PUT:  # it builds on one tier
            direct = self._direct_stores(owner)
            where = [tiers.host if direct is None else direct.tier]
        chain = find_chain(keys, where)
        if chain is None:
            return prompt
        num_before = chain.num_before
        # DRAM keeps no block without those before it, so a prefetch brings them along.
        start = 0 if kind is TaskKind.PREFETCH else prompt.start + num_before
        tail_at = prompt.tail_at + num_before if prompt.tail_at else 0
        return msgspec.structs.replace(
            prompt, keys=chain, start=start, stop=prompt.stop + num_before, tail_at=tail_at,
            num_before=num_before,
        )  # fmt: skip

    def _terms(self) -> EarlyTerms:
        """Return what an early load may take; nothing where DRAM is no tier."""
        terms = self._cache.early.terms(self._cache.tiers.now)
        return terms if self._cache.direct_stores is None else terms._replace(num_blocks=0)

    def _plan(self, owner: Session, prompt: Prompt) -> Plan:
        """Have the planner for this kind of task plan it, within what its session may take."""
        cache, rate = self._cache, owner.prefill_blocks_per_s
        if prompt.kind is TaskKind.GET:
            # It has waited as long as computing takes, and does not wait once more.
            if cache.early.is_overdue(prompt.keys, cache.tiers.now):
                on_host = cache.tiers.host.index.match(prompt.keys).num_blocks
                stop = max(prompt.start, min(prompt.stop, on_host))
                prompt = msgspec.structs.replace(prompt, stop=stop)
            return cache.loads.plan_get(prompt, rate, self._may_go_direct(owner))
        if prompt.kind is TaskKind.PREFETCH:
            return cache.loads.plan_prefetch(prompt, rate, self._terms())
        if (direct := self._direct_stores(owner)) is not None:
            return direct.plan_put(prompt, cache.stores.era)
        return cache.stores.plan_put(prompt, self._share_of_backlog(owner))

    def plan_store(self, owner: Session, prompt: Prompt) -> Plan:
        """For a put that DRAM had nothing to take from: what the tiers below it lack."""
        return self._cache.stores.plan_store(prompt, self._share_of_backlog(owner))

    def _direct_stores(self, owner: Session) -> DirectStores | None:
        """What plans the puts of a session whose blocks go past DRAM."""
        return self._cache.direct_stores if self._may_go_direct(owner) else None

    def _may_go_direct(self, owner: Session) -> bool:
        """Whether a session's ranks move blocks between GPU and SSD past DRAM."""
        return self._executors.are_direct(owner.executors[OpKind.DISK2D])

    def _why_not(self, owner: Session, prompt: Prompt) -> str | None:
        """Why nothing can be matched for a session now."""
        # Each match pins blocks: a scheduler that launches nothing must not hold them all.
        if len(owner.tasks) >= self._max_open_tasks:
            return "session_task_limit"
        if self._sessions.is_disputed(owner.engine):
            return "name_disputed"
        gpu_op = _GPU_OP_OF.get(prompt.kind)
        if gpu_op and not self._executors.are_up(owner.executors[gpu_op]):
            return "ranks_missing"
        return None if prompt.keys.parent_key is None else "parent_missing"

    def _share_of_backlog(self, owner: Session) -> int:
        """How many more blocks of a session may wait to be written below.

        Sessions that have open tasks share the room.
        """
        room = self._cache.stores.max_backlog // self._sessions.num_with_tasks(owner)
        return room - owner.store_backlog

    # -- loads that begin before a get, or instead of waiting for it -------------------------------
    #
    #     prefetch --its request comes--> what has not begun is left to the get
    #     a session said when it returns --shortly before--> its last prompt is loaded

    def awaits_load(self, session: SessionId, prompt: Prompt, now: float) -> bool:
        """Whether a get that can wait should ask again a little later.

        What has not begun to move is left to the get, which moves blocks on as they come.
        """
        owner = self._sessions.get(session)
        if owner is None:
            return False
        if self._is_coming(owner, prompt, now):
            return True
        if not self._cache.early.num_open:
            return False
        for load in self._awaited(owner, prompt, now):
            self._end_unstarted(load, "its request has come, and loads the rest", now)
        return bool(self._awaited(owner, prompt, now))

    def _is_coming(self, owner: Session, prompt: Prompt, now: float) -> bool:
        """Whether more of a prompt is there in a moment: what another engine has computed is on its
        way to a peer's DRAM, or it computes the rest now. Waits no longer than computing it would
        take, or than the request says."""
        tier, keys, awaited = self._cache.tiers.peer, prompt.keys, prompt.hand_over
        is_awaited = now < awaited.until_s
        is_askable = tier is not None and tier.can_be_asked
        if keys.parent_key is not None or not (is_awaited or is_askable):
            return False
        self._roots.place(keys)
        have = self._cache.tiers.most_cached(keys)
        if is_awaited and not self._is_lost(awaited):
            if self._is_there(prompt, have):
                return False
            self._load_ahead(owner, prompt, have, now)
            return True
        if tier is None or have >= prompt.stop:
            return False
        since = tier.coming_since(keys.root, keys.key(have), now)
        rate = owner.prefill_blocks_per_s
        return since is not None and now < since + load_patience_s(
            prompt.stop - have, rate, _LONGEST_WAIT_S
        )

    def _is_lost(self, awaited: HandOver) -> bool:
        """Whether the peer that a request waits for will not have its prompt."""
        tier = self._cache.tiers.peer
        return bool(awaited.source) and (tier is None or awaited.source in tier.lost)

    def _is_there(self, prompt: Prompt, have: int) -> bool:
        """Whether tiers have all that can be loaded of a prompt, ``have`` of its blocks."""
        tails, tiers = self._cache.loads.tails, self._cache.tiers
        if tails is None:
            return have >= prompt.stop
        found = tails.last(prompt.keys, prompt.start, prompt.stop, tiers)
        return found is not None and found.position >= prompt.stop

    def _load_ahead(self, owner: Session, prompt: Prompt, have: int, now: float) -> None:
        """Begin to load what is there of a prompt while the rest is computed elsewhere."""
        cache, keys = self._cache, prompt.keys
        cache.early.keep_longest(keys)
        if have <= cache.tiers.host.index.match(keys).num_blocks or any(
            not load.has_landed for load in cache.early.find(keys)
        ):
            return
        ahead = Prompt(TaskKind.PREFETCH, keys, 0, have, prompt.num_tokens)
        terms = self._terms()._replace(ttl_s=prompt.hand_over.until_s - now + _AHEAD_S)
        plan = cache.loads.plan_prefetch(ahead, owner.prefill_blocks_per_s, terms)
        self._runner.load_early(plan, keys, now)

    def _awaited(self, owner: Session, prompt: Prompt, now: float) -> list[EarlyLoad]:
        """Return the early loads that a get waits for, no longer than computing its blocks would
        take."""
        if prompt.keys.parent_key is not None:
            return []
        self._roots.place(prompt.keys)
        patience_s = load_patience_s(prompt.stop, owner.prefill_blocks_per_s, _LONGEST_WAIT_S)
        return self._cache.early.awaited(prompt.keys, now, patience_s)

    def tick_early(self, now: float) -> None:
        """Let go of what was loaded, or waits, in vain, and load for sessions that return."""
        self._cache.early.expire(now)
        while (load := self._cache.early.take_overdue(now)) is not None:
            self._end_unstarted(load, "it had no turn in time", now)
        sessions = self._cache.sessions
        returning = iter(partial(sessions.take_returning, now), None)
        for keys in islice(returning, _FETCHES_A_TURN):
            self._cache.tiers.advance(now)
            # Its tiers name the prompt so already, whichever weights its engine has now.
            prompt = Prompt(TaskKind.PREFETCH, keys, 0, keys.num_blocks, 0)
            rate = self._sessions.highest_prefill_rate
            plan = self._cache.loads.plan_prefetch(prompt, rate, self._terms())
            num_below = plan.num_blocks - plan.sources.get(TierName.CPU, 0)
            sessions.counters.fetched_blocks += num_below
            self._runner.load_early(plan, keys, now)

    def stage(self, root: RootId, key: BlockKey, num_units: int, now: float) -> None:
        """Begin to bring to DRAM what SSD has of the prompt that ends with a block, for a peer that
        is to read it; what there is no room for is a miss there.

        Args:
            num_units: Of the tail behind the block; 0 for none.
        """
        cache, ssd = self._cache, self._cache.tiers.by_name.get(TierName.SSD)
        if ssd is None or ssd.name in cache.tiers.unavailable or cache.direct_stores is not None:
            return
        cache.tiers.advance(now)
        path = ssd.index.path_keys(ssd.index.locate(root, key))
        if not path and num_units and ssd.tails.find(root, key) is not None:
            path = [key]  # of a model whose blocks hold nothing
        terms = cache.early.staging_terms()
        if not path or not terms.num_blocks:
            return
        keys = IndexedKeys(root, path, len(path))
        prompt = Prompt(TaskKind.PREFETCH, keys, 0, len(path), 0)
        # Up to there SSD has all of it, so neither the store nor other peers are read for this one.
        self._runner.load_early(cache.loads.plan_prefetch(prompt, terms=terms), keys, now, True)

    def next_early(self) -> float | None:
        """When `tick_early` has something to do at the earliest."""
        sessions = self._cache.sessions
        times = (self._cache.early.next_deadline(), sessions.returns.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def _end_unstarted(self, load: EarlyLoad, reason: str, now: float) -> None:
        """Read nothing more for an early load than what is being read."""
        task = self._sessions.tasks.get(load.task_id)
        if task is None or not task.waiting:
            return
        task.errors.append(reason)
        if not (task.running or task.moved or TierName.CPU in task.plan.sources):
            task.cancel()  # it has brought nothing, and nothing has failed
        self._runner.end_unstarted(task, now)
