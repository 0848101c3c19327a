"""The tiers below vLLM's DRAM against a plain model: what is loaded has the right bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexcache.cache.tier import Tier
from flexcache.ids import BlockKey, OpKind, RootId, TierName
from flexcache.integration.vllm.chunk_tiers import ChunkTiers, Lane, StorePresence
from flexcache.tasks.executors import SlotChecksums
from flexcache.tasks.instructions import DISK, REMOTE, ReplaceExecutor, RunLookUp, RunOp
from flexcache.transfer.messages import Done, LookedUp, pack_checksums

ROOT = RootId(b"r" * 16)
NUM_SLOTS, NUM_BLOCKS = 6, 24
KEYS = [BlockKey(bytes([65 + i]) * 36) for i in range(14)]
OP_TIMEOUT_S, LOOKUP_TIMEOUT_S = 30.0, 0.5


class ChunkTiersMachine(RuleBasedStateMachine):
    """Workers that move names of chunks between lists."""

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Any] = []
        self.ssd = Tier(TierName.SSD, NUM_SLOTS)
        presence = StorePresence(ROOT, 10, LOOKUP_TIMEOUT_S, self.instructions)
        self.presence = presence
        checksums = SlotChecksums(NUM_SLOTS)
        lanes = [
            Lane(each, OP_TIMEOUT_S, 4096, checksums, self.instructions, max_ops_at_once=3)
            for each in (DISK, REMOTE)
        ]
        self.tiers = ChunkTiers(ROOT, self.ssd, presence, lanes, checksums, NUM_BLOCKS)
        self.now = 0.0
        self.dram: list[bytes | None] = [None] * NUM_BLOCKS
        self.slots: list[bytes | None] = [None] * NUM_SLOTS
        self.store: set[bytes] = set()
        self.ops: dict[int, RunOp] = {}
        self.questions: list[RunLookUp] = []
        self.jobs: dict[int, tuple[bool, dict[bytes, int]]] = {}
        self.busy: set[int] = set()
        self.next_job = 0

    # -- the engine ------------------------------------------------------------------------------

    def begin(self, keys: list[BlockKey], is_load: bool) -> None:
        free = [block for block in range(NUM_BLOCKS) if block not in self.busy][: len(keys)]
        keys = keys[: len(free)]
        self.next_job += 1
        self.jobs[self.next_job] = is_load, dict(zip(keys, free, strict=True))
        self.busy.update(free)
        for key, block in zip(keys, free, strict=True):
            self.dram[block] = None if is_load else key
        call = self.tiers.load if is_load else self.tiers.store
        call(self.next_job, keys, free, self.now)
        self.carry_out()

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    def put(self, keys: list[BlockKey]) -> None:
        self.begin(keys, is_load=False)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    def get(self, keys: list[BlockKey]) -> None:
        """Look up, as vLLM does, and load what is there; now and then also what is not."""
        answers = [self.tiers.look_up("request", key, self.now) for key in keys]
        self.tiers.step_ended(self.now)
        self.carry_out()
        self.begin([k for k, there in zip(keys, answers, strict=True) if there] or keys[:1], True)

    # -- the workers -----------------------------------------------------------------------------

    def carry_out(self) -> None:
        taken, self.instructions[:] = self.instructions[:], []
        for instruction in taken:
            match instruction:
                case RunOp(_, _, op):
                    self.ops[op.op_id] = instruction
                case RunLookUp():
                    self.questions.append(instruction)
                case ReplaceExecutor(executor):
                    self.lose(executor)

    @precondition(lambda self: self.ops)
    @rule(data=st.data())
    def end_op(self, data: st.DataObject) -> None:
        run = self.ops.pop(data.draw(st.sampled_from(sorted(self.ops))))
        op, count = run.op, len(run.op)
        num_ok = data.draw(st.integers(0, count) | st.just(count))
        bad = False
        moved = 0
        for i in range(num_ok):
            if not self.move(run, i):
                bad = True
                break
            moved += 1
        sums = b""
        if op.kind is OpKind.H2DISK:
            found = [hash(self.slots[s]) & 0xFFFF for s in op.dst]
            sums = pack_checksums(np.array(found, dtype=np.uint64))
        error = None if moved == count else "it did not go well"
        self.tiers.op_done(run.executor, Done(op.op_id, moved, error, bad, sums), self.now)
        if op.kind is OpKind.REMOTE2H and moved < count:  # or vLLM would ask for it for ever
            assert not self.presence.is_there(op.names.keys[moved])
        self.carry_out()

    def move(self, run: RunOp, i: int) -> bool:
        """Move one chunk; False if it is not what it should be."""
        op = run.op
        match op.kind:
            case OpKind.H2DISK:
                self.slots[op.dst[i]] = self.dram[op.src[i]]
            case OpKind.DISK2H:
                found = self.slots[op.src[i]]
                if int(run.checksums[i]) != hash(found) & 0xFFFF:
                    return False
                self.dram[op.dst[i]] = found
            case OpKind.H2REMOTE:
                assert self.dram[op.src[i]] == op.names.keys[i]
                self.store.add(op.names.keys[i])
            case OpKind.REMOTE2H:
                if op.names.keys[i] not in self.store:
                    return False
                self.dram[op.dst[i]] = op.names.keys[i]
        return True

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def rot(self, slot: int) -> None:
        self.slots[slot] = b"rotten"

    @rule(key=st.sampled_from(KEYS), appears=st.booleans())
    def another_host(self, key: BlockKey, appears: bool) -> None:
        (self.store.add if appears else self.store.discard)(key)

    @precondition(lambda self: self.questions)
    @rule(fails=st.booleans())
    def answer(self, fails: bool) -> None:
        question = self.questions.pop(0)
        present = 0
        while present < len(question.keys) and question.keys[present] in self.store:
            present += 1
        error = "no answer" if fails else None
        self.tiers.looked_up(LookedUp(question.lookup_id, present, error), self.now)

    @rule(worker=st.sampled_from([DISK, REMOTE]))
    def come_up(self, worker: str) -> None:
        self.tiers.worker_up(worker)

    @rule(worker=st.sampled_from([DISK, REMOTE]))
    def lose(self, worker: str) -> None:
        self.ops = {number: run for number, run in self.ops.items() if run.executor != worker}
        if worker == REMOTE:
            self.questions.clear()
        self.tiers.worker_down(worker, "killed", self.now)

    @rule(seconds=st.floats(0, 2) | st.just(OP_TIMEOUT_S))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tiers.tick(self.now)
        self.carry_out()

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def loads_are_right(self) -> None:
        self.tiers.check()
        for end in self.tiers.take_ended():
            is_load, places = self.jobs.pop(end.job_id)
            assert set(end.moved) <= set(places)
            if is_load:
                assert end.is_whole == (len(end.moved) == len(places))
                assert all(self.dram[places[key]] == key for key in end.moved)
            self.busy.difference_update(places.values())
        assert self.tiers.num_open_jobs == len(self.jobs)
        assert bool(self.ops) or not self.jobs

    def teardown(self) -> None:
        for worker in (DISK, REMOTE):
            self.lose(worker)
        self.loads_are_right()
        assert not self.jobs
        assert self.ssd.num_leased == 0


TestChunkTiers = ChunkTiersMachine.TestCase
TestChunkTiers.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
