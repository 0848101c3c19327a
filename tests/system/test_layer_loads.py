"""Loads by layer when the server hangs or dies: lost promptly, and nothing moves afterwards."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from cluster import until
from engine_memory import EngineMemory
from test_shared import CONFIG, Member, members, tokens_of

from flexcache import CacheConfig
from flexcache.client.rank import ClientState


@pytest.mark.whole
@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_load_by_layer_whose_server_is_gone_is_lost_and_moves_nothing_afterwards(
    fault: signal.Signals, memory: EngineMemory
) -> None:
    zero = Member(CacheConfig(**CONFIG, server_timeout_s=3.0), memory=memory)
    with members(zero):
        zero.load.put(3, 20)
        pid = zero.manager.stats()["server_pid"]
        task_id, mask = zero.manager.get_match(tokens_of(3, 20))
        assert mask.all()
        os.kill(pid, signal.SIGSTOP)  # so that the order is not passed on
        zero.manager.launch([task_id], [np.arange(20 * 16)], gated=True)
        layers = zero.client.load_by_layer(task_id, 20)
        if fault == signal.SIGKILL:
            os.kill(pid, fault)
        assert not layers.wait_all(60)
        layers.give_up()
        for layer in zero.kv.values():
            layer[:20] = 5  # the slots serve another request now
        if fault == signal.SIGSTOP:
            until(lambda: zero.client.state is ClientState.HELLO)
            os.kill(pid, signal.SIGCONT)
        else:
            until(lambda: not zero.manager.is_ready())
        zero.client.wait_registered(60)
        zero.manager.wait_ready(60)
        assert not layers.wait_all(0)
        assert all((layer[:20] == 5).all() for layer in zero.kv.values())
        if fault == signal.SIGSTOP:
            assert zero.load.get(3, 20) == 20
        assert zero.load.seen.wrong == []
