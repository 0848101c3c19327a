"""LayerLoad against a plain model, and between two threads."""

from __future__ import annotations

import threading

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from flexcache.transfer.gates import LayerLoad

LAYERS = {"a": 2, "b": 4, "shares a": 2, "c": 5}
ENDS = (2, 4, 5)
NAMES = st.sampled_from([*LAYERS, "unknown"])


class LayerLoadMachine(RuleBasedStateMachine):
    """The model: how many segments have arrived, and whether the load is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.load = LayerLoad(LAYERS, 3)
        self.num_come = 0
        self.is_lost = False
        self.is_copying = False

    @precondition(lambda self: not self.is_copying and self.num_come < 5)
    @rule()
    def begin(self) -> None:
        assert self.load.begin_part() == (not self.is_lost)
        self.is_copying = not self.is_lost

    @precondition(lambda self: self.is_copying)
    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        self.num_come = data.draw(st.sampled_from([end for end in ENDS if end > self.num_come]))
        self.load.part_started(self.num_come, None)
        self.is_copying = False

    @rule()
    def end(self) -> None:
        self.load.end()
        self.is_copying = False
        self.is_lost |= self.num_come < 5

    @precondition(lambda self: not self.is_copying)
    @rule()
    def give_up(self) -> None:
        self.load.give_up()
        self.is_lost = True

    @rule(name=NAMES)
    def wait_layer(self, name: str) -> None:
        has_come = self.num_come >= LAYERS.get(name, 5) and not self.is_lost
        assert self.load.wait_layer(name, 0) == has_come

    @rule()
    def wait_all(self) -> None:
        assert self.load.wait_all(0) == (self.num_come == 5 and not self.is_lost)


TestLayerLoad = LayerLoadMachine.TestCase


def test_giving_up_waits_for_the_running_copy() -> None:
    load = LayerLoad(LAYERS, 1)
    assert load.begin_part()
    given_up = threading.Thread(target=load.give_up)
    given_up.start()
    assert not load.wait_all(60)  # woken when it is lost
    assert given_up.is_alive()
    load.part_started(2, None)
    given_up.join(60)
    assert not given_up.is_alive()
    assert not load.begin_part()


def test_a_waiter_is_woken_by_the_layer_and_by_the_end() -> None:
    load, has_seen_b = LayerLoad(LAYERS, 1), threading.Event()
    seen: list[bool] = []

    def wait() -> None:
        seen.append(load.wait_layer("b", 60))
        has_seen_b.set()
        seen.append(load.wait_layer("c", 60))

    thread = threading.Thread(target=wait)
    thread.start()
    for end in (2, 4):
        load.begin_part()
        load.part_started(end, None)
    assert has_seen_b.wait(60)
    load.end()
    thread.join(60)
    assert seen == [True, False]
