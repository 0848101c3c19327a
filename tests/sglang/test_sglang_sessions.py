"""Sessions of a real SGLang engine: named by requests, over when SGLang closes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_engine import PAGE, TinyEngine, apart, prompt
from sglang_linker import engine_with_linker, forget_gpu, linker_of, manager_of, settle


def sessions(engine: TinyEngine) -> dict[str, Any]:
    return dict(manager_of(engine).stats()["sessions"])


def check_sessions(ssd: str) -> None:
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    engine = engine_with_linker(ssd)
    shared, own = prompt(160), prompt(320, 5)
    engine.generate(shared, session_id="b")
    engine.generate(shared + own, session_id="a")
    engine.generate(prompt(160, 9))
    settle(engine)
    assert sessions(engine)["known"] == 2
    assert not linker_of(engine).sessions._of, "requests that have ended"

    engine.scheduler.close_session(CloseSessionReqInput(session_id="a"))
    engine.scheduler.close_session(CloseSessionReqInput(session_id="unheard of"))
    closed = sessions(engine)
    assert (closed["over"], closed["unknown"]) == (2, 1)
    num_own = (len(own) + 7) // PAGE
    assert closed["retired_blocks"] == 2 * num_own, "in DRAM and on SSD, without what b shares"

    forget_gpu(engine, "CPU")
    again = engine.generate(shared + own, session_id="a")
    assert again.cached_tokens == len(shared + own) - PAGE, "what is over is still found"
    settle(engine)
    assert sessions(engine)["returned_sessions"] == 1

    forget_gpu(engine, "CPU")
    early = manager_of(engine).stats()["early_loads"]
    request = engine.add(shared + own)
    assert request.rid in linker_of(engine).parking
    linker_of(engine).ended(request.rid)
    assert request.rid not in linker_of(engine).parking
    engine.step_until(lambda: not manager_of(engine).stats()["tasks"]["running"])
    after = manager_of(engine).stats()["early_loads"]
    assert after["open_blocks"] == 0, "nothing is kept for a request that has gone"
    assert after["early"] == early["early"]
    engine.step_until(request.finished)
    settle(engine)
    manager_of(engine).check()


def test_sessions_are_known_by_name_and_over_when_they_are_closed(tmp_path: Path) -> None:
    apart(check_sessions, str(tmp_path))
