"""Sessions of a real SGLang engine: named by requests, over when SGLang closes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import until
from sglang_engine import (
    PAGE,
    TinyEngine,
    apart,
    engine_with_linker,
    forget_gpu,
    linker_of,
    manager_of,
    prompt,
    settle,
)

pytestmark = pytest.mark.whole


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
    assert not linker_of(engine).requests._known, "requests that have ended"

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
    assert request.rid in linker_of(engine).requests.parked
    linker_of(engine).requests.ended(request.rid)
    assert request.rid not in linker_of(engine).requests.parked
    until(lambda: not manager_of(engine).stats()["tasks"]["running"])
    until(lambda: open_blocks(engine) == 0)
    assert manager_of(engine).stats()["early_loads"]["early"] == early["early"]
    engine.step_until(request.finished)

    forget_gpu(engine, "CPU")
    request = engine.add(shared + own)
    until(lambda: linker_of(engine).requests.is_ready(request.rid))
    assert open_blocks(engine) > 0
    linker_of(engine).requests.ended(request.rid)
    until(lambda: open_blocks(engine) == 0)
    engine.step_until(request.finished)
    settle(engine)

    check_later_turns(engine)
    manager_of(engine).check()


def open_blocks(engine: TinyEngine) -> int:
    return int(manager_of(engine).stats()["early_loads"]["open_blocks"])


def check_later_turns(engine: TinyEngine) -> None:
    """All turns of a session are over with it, whether it is named by request or by SGLang."""
    from sglang.srt.managers.io_struct import (
        CloseSessionReqInput,
        OpenSessionReqInput,
        SessionParams,
    )

    engine.scheduler.open_session(
        OpenSessionReqInput(capacity_of_str_len=10_000, session_id="opened")
    )
    for session_id, seed in (("named", 20), ("opened", 30)):
        first, second = prompt(160, seed), prompt(160, seed + 1)
        before = sessions(engine)["retired_blocks"]
        if session_id == "named":
            engine.generate(first, session_id=session_id)
            forget_gpu(engine, "CPU")
            engine.generate(first + second, session_id=session_id)
            num_pages = (320 + 7) // PAGE
        else:
            engine.generate(first, session_params=SessionParams(id=session_id))
            num_pages = (160 + 7) // PAGE
        settle(engine)
        engine.scheduler.close_session(CloseSessionReqInput(session_id=session_id))
        num_retired = sessions(engine)["retired_blocks"] - before
        assert num_retired == 2 * num_pages, f"{session_id}: in DRAM and on SSD"


def test_sessions_are_known_by_name_and_over_when_they_are_closed(tmp_path: Path) -> None:
    apart(check_sessions, str(tmp_path))
