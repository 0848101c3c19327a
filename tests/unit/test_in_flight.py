"""InFlight against a plain model: which pieces of which ops are on their way."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from flexcache.ids import OpKind
from flexcache.transfer import device_worker
from flexcache.transfer.device_worker import InFlight
from flexcache.transfer.messages import Done, Execute
from flexcache.transfer.op_copies import OpCopies

STREAMS = [(OpKind.H2D, True), (OpKind.H2D, False), (OpKind.D2H, False)]


class Landing:
    def __init__(self) -> None:
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def wait(self) -> None:
        pass


class InFlightMachine(RuleBasedStateMachine):
    """The model: each stream's pieces in order, and the ops of which no more will be queued."""

    def __init__(self) -> None:
        super().__init__()
        self.flying = InFlight()
        self.ops: list[tuple[OpCopies, bool]] = []
        self.ended: dict[int, str | None] = {}
        self.pieces: dict[tuple[OpKind, bool], list[tuple[int, int, Landing]]] = {
            stream: [] for stream in STREAMS
        }

    @rule(stream=st.sampled_from(STREAMS))
    def begin(self, stream: tuple[OpKind, bool]) -> None:
        message = Execute(len(self.ops), stream[0], b"", b"", 1)
        self.ops.append((OpCopies(message, 3, 3, []), stream[1]))

    def running(self) -> list[int]:
        return [number for number in range(len(self.ops)) if number not in self.ended]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), size=st.integers(0, device_worker.MOST_BYTES))
    def queue(self, data: st.DataObject, size: int) -> None:
        number = data.draw(st.sampled_from(self.running()))
        op, urgent = self.ops[number]
        landing = Landing()
        self.flying.add(op, size, landing, urgent)
        self.pieces[op.message.kind, urgent].append((number, size, landing))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), failure=st.sampled_from([None, "refused"]))
    def end(self, data: st.DataObject, failure: str | None) -> None:
        number = data.draw(st.sampled_from(self.running()))
        self.ended[number] = failure
        done = self.flying.end(self.ops[number][0], failure)
        assert done == ([] if self.is_flying(number) else [self.answer(number)])

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        expected = []
        for pieces in self.pieces.values():
            for _, _, landing in pieces[: data.draw(st.integers(0, len(pieces)))]:
                landing.is_past = True
            while pieces and pieces[0][2].is_past:
                number = pieces.pop(0)[0]
                if number in self.ended and not self.is_flying(number):
                    expected.append(self.answer(number))
        assert self.flying.take_landed() == expected

    def teardown(self) -> None:
        self.flying.check()

    def is_flying(self, number: int) -> bool:
        return any(number == each[0] for pieces in self.pieces.values() for each in pieces)

    def answer(self, number: int) -> Done:
        failure = self.ended[number]
        return Done(number, 3) if failure is None else Done(number, 0, error=failure)

    @rule()
    def compare(self) -> None:
        self.flying.check()
        sizes = {
            stream: sum(size for _, size, _ in pieces) for stream, pieces in self.pieces.items()
        }
        layers, loads, stores = (sizes[stream] for stream in STREAMS)
        most, less = device_worker.MOST_BYTES, device_worker.BESIDE_LAYERS
        assert self.flying.has_room(OpKind.H2D, urgent=True) == (layers < less)
        for beside, limit in ((False, most), (True, less)):
            has_room = partial(self.flying.has_room, beside_layers=beside)
            assert has_room(OpKind.H2D) == (layers + loads < limit)
            assert has_room(OpKind.D2H) == (stores < limit)
        assert bool(self.flying) == any(self.pieces.values())


TestInFlight = InFlightMachine.TestCase


def test_a_query_that_fails_is_kept_as_the_reason() -> None:
    class Lost(Landing):
        def query(self) -> bool:
            raise OSError("no device")

    flying = InFlight()
    op = OpCopies(Execute(1, OpKind.H2D, b"", b"", 1), 1, 1, [])
    flying.add(op, 1, Lost(), False)
    assert flying.end(op) == []
    assert flying.take_landed() == []
    assert flying.failure == "OSError: no device"
    op.num_in_flight = 5
    with pytest.raises(AssertionError):
        flying.check()
