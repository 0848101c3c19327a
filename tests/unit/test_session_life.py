"""The life of a client at a shared server, against a plain model of what its tasks may expect."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexcache.client.remote import SessionLife, SessionState, Settled, answer_due_s
from flexcache.client.tasks import ClientTask
from flexcache.errors import InternalError
from flexcache.ids import SessionId, TaskId, TaskKind, is_of_same_server, make_session
from flexcache.tasks.instructions import Offer

LONGEST_S = 5.0
"""From the last sign of life of a lost server to the answers, where the loss is seen in time."""


rarely = st.integers(0, 19).map(lambda number: number == 7)


@dataclass(eq=False)
class Given:
    """A task as the model knows it."""

    task: ClientTask
    session: SessionId
    due_s: float = math.inf
    """When it must be answered at the latest, once its session is lost."""


@dataclass
class Fence:
    """The fence that ranks of a session hold while they may copy."""

    is_held: bool = False


@dataclass
class Model:
    """The state known outside the machine."""

    now: float = 100.0
    heard_s: float = 100.0
    session: SessionId | None = None
    fences: dict[SessionId, Fence] = field(default_factory=dict)
    waiting: list[Given] = field(default_factory=list)
    """Tasks of lost sessions that have no answer yet."""
    open: list[Given] = field(default_factory=list)


class LifeMachine(RuleBasedStateMachine):
    """Sessions come and go, ranks hold fences or let go, time passes; every lost task is answered
    once, and not while a rank may copy unless it takes too long or nothing better can be done."""

    @initialize()
    def begin(self) -> None:
        self.life = SessionLife()
        self.model = Model()
        self.numbers = iter(range(1, 1000))
        self.num_losses = 0

    # -- what happens ----------------------------------------------------------------------------

    @precondition(lambda self: self.model.session is None and not self.life.is_over)
    @rule(server=st.sampled_from([7, 8]), missing=st.lists(st.just("rank 0"), max_size=1),
          launched=st.lists(st.booleans(), max_size=2), is_held=st.booleans())  # fmt: skip
    def welcome(self, server: int, missing: list[str], launched: list[bool], is_held: bool) -> None:
        session = make_session(server, next(self.numbers))
        of_same = [g for g in self.model.waiting if is_of_same_server(session, g.session)]
        settled = self.life.welcomed(session, missing)
        self.model.session, self.model.heard_s = session, self.model.now
        self.model.fences[session] = Fence(is_held)
        assert bool(settled and settled.tasks) == bool(of_same)
        if settled is not None:
            assert settled.is_safe
            self.answer(settled, may_be_unsafe=False)
        assert self.life.is_ready == (not missing)
        assert self.life.error is None
        for is_launched in launched:
            self.match(is_launched)

    @precondition(lambda self: self.model.session is not None)
    @rule(launched=st.booleans())
    def match(self, launched: bool) -> None:
        assert self.model.session is not None
        task = ClientTask(Offer(TaskId(1), TaskKind.GET, 16, 0, 1, {}, 1), launched)
        self.model.open.append(Given(task, self.model.session))

    @precondition(lambda self: self.model.session is not None)
    @rule(is_held=st.booleans())
    def ranks_hold_or_let_go(self, is_held: bool) -> None:
        assert self.model.session is not None
        self.model.fences[self.model.session].is_held = is_held

    @rule()
    def ranks_of_lost_sessions_let_go(self) -> None:
        for session, fence in self.model.fences.items():
            fence.is_held &= session == self.model.session

    @precondition(lambda self: self.model.session is not None)
    @rule(missing=st.lists(st.just("disk worker"), max_size=1),
          problems=st.lists(st.just("rank 0: no"), max_size=1))  # fmt: skip
    def inform(self, missing: list[str], problems: list[str]) -> None:
        self.life.informed(missing, problems)
        if self.life.state is SessionState.SERVING:
            assert self.life.is_ready == (not missing)
            assert self.life.problems == problems

    @rule(seconds=st.sampled_from([0.01, 0.6, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds

    @precondition(lambda self: self.model.session is not None)
    @rule()
    def hear(self) -> None:
        self.model.heard_s = self.model.now

    @precondition(lambda self: self.model.session is None and not self.life.is_over)
    @rule(final=rarely, reason=st.sampled_from(["another model", "taken"]))
    def refuse(self, final: bool, reason: str) -> None:
        before = self.life.error
        assert self.life.refused(reason, final) == (reason != before)
        assert self.life.error == reason
        assert self.life.is_over == final

    @rule(is_known=st.booleans())
    def end(self, is_known: bool) -> None:
        """End the conversation, whether a session was open or not."""
        model, was_serving = self.model, self.life.state is SessionState.SERVING
        earlier = list(model.waiting)
        tasks = [given.task for given in model.open]
        settled = self.life.ended("it died" if is_known else None, tasks, model.heard_s, model.now)
        self.num_losses += was_serving
        if model.session is None:
            assert settled is None
            return
        assert [given.task for given in earlier] == list(settled.tasks if settled else [])
        self.answer(settled, may_be_unsafe=True)
        for given in model.open:
            given.due_s = answer_due_s(model.heard_s, model.now)
        model.waiting, model.open, model.session = model.open, [], None

    @rule()
    def settle(self) -> None:
        model = self.model
        held = any(model.fences[given.session].is_held for given in model.waiting)
        settled = self.life.settle(model.now, slots_are_free=not held)
        launched = any(given.task.launched for given in model.waiting)
        is_late = any(
            given.due_s is not None and model.now >= given.due_s for given in model.waiting
        )
        must = not held or not launched or is_late or self.life.state is SessionState.CLOSED
        if model.waiting:
            assert (settled is not None) == must
        self.answer(settled, may_be_unsafe=is_late or self.life.state is SessionState.CLOSED)

    @rule(really=rarely)
    def close(self, really: bool) -> None:
        if really:
            self.life.close()
            assert self.life.state is SessionState.CLOSED

    # -- what must hold --------------------------------------------------------------------------

    def answer(self, settled: Settled | None, may_be_unsafe: bool) -> None:
        """Check that exactly the waiting tasks are answered, and none twice."""
        if settled is None:
            return
        assert [given.task for given in self.model.waiting] == list(settled.tasks)
        assert settled.is_safe or may_be_unsafe
        assert settled.reason
        self.model.waiting = []

    @invariant()
    def its_own_checks_hold(self) -> None:
        self.life.check()

    @invariant()
    def it_serves_in_a_session_only_and_counts_each_loss(self) -> None:
        serves = self.life.state is SessionState.SERVING
        assert not serves or self.model.session == self.life.session
        assert not self.life.is_ready or serves
        assert self.life.num_losses == self.num_losses

    @invariant()
    def none_waits_longer_than_it_must(self) -> None:
        for given in self.model.waiting:
            assert given.due_s <= max(self.model.now, self.model.heard_s) + LONGEST_S


TestLife = LifeMachine.TestCase


def test_a_lost_server_and_a_hanging_rank_together_cost_five_seconds_at_most() -> None:
    assert answer_due_s(heard_s=100.0, now=103.5) == 105.0
    assert answer_due_s(heard_s=100.0, now=100.0) == 105.0
    # A longer `server_timeout_s` has cost more already; ranks that do not hang get a moment.
    assert answer_due_s(heard_s=100.0, now=110.0) == 110.5


def test_the_checker_notices_a_state_without_its_session() -> None:
    life = SessionLife()
    life.check()
    life.state = SessionState.SERVING
    with pytest.raises(InternalError, match="without a session"):
        life.check()
    life = SessionLife()
    life.missing = []
    with pytest.raises(InternalError, match="but the server"):
        life.check()
