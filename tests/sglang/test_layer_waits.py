"""What SGLang's KV pool waits with, when layers come in time and too late."""

from __future__ import annotations

from sglang_engine import apart

from flexcache.transfer.gates import LayerLoad


def check_late() -> None:
    from flexcache.integration.sglang.loads import LayerWaits

    for timeout_s, comes_late in ((60.0, False), (0.0, True)):
        waits = LayerWaits({0: ["k.0", "v.0"]}, timeout_s)
        load = LayerLoad({"k.0": 1, "v.0": 2}, 1)
        index = waits.add([load])
        waits.set_consumer(index)
        if comes_late:
            waits.wait_until(0)  # the model computes with what is there
        assert load.begin_part()
        load.part_started(2, None)
        load.end()
        if not comes_late:
            waits.wait_until(0)
        assert waits.finish(index) != comes_late


def test_a_layer_that_comes_after_it_was_read_does_not_count() -> None:
    apart(check_late)
