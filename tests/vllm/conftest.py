"""Tests on a real vLLM engine; they skip, with the reason, if vLLM is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import second_runner
from engines import ENGINE_ENV, Engine, engine_arguments, hide_numba_from_vllm
from paths import MODELS

os.environ.update(ENGINE_ENV)  # before vLLM is imported: OpenMP would wait on every core for work
second_runner.use_if_installed()
if os.environ.get("REQUIRE_VLLM") and not second_runner.is_installed():
    raise RuntimeError("there is no Triton for vLLM's second runner; scripts/test.sh fetches it")

collect_ignore: list[str] = []
try:
    import vllm  # noqa: F401
except ImportError:
    if os.environ.get("REQUIRE_VLLM"):
        raise
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is to run on this lane's engine: on the second runner with asynchronous scheduling
    everything, but for what needs the first."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.vllm)
    left_out = [item for item in ours if not _runs_here(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _runs_here(item: pytest.Item) -> bool:
    if not second_runner.is_installed():
        return True
    needs_first = item.get_closest_marker("first_runner") is not None
    is_first, is_ahead = second_runner.is_first(), second_runner.schedules_ahead()
    if needs_first and not is_first:
        return False
    if not is_first and is_ahead:
        return True
    if item.get_closest_marker("runners") is not None:
        item.add_marker(pytest.mark.whole)
        return True
    return needs_first and is_first and not is_ahead


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for the whole session, in this process."""
    probe_dir = tmp_path_factory.mktemp("probe")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", KV_PROBE_DIR=str(probe_dir))
    from make_models import make_model
    from vllm import LLM
    from vllm.config import KVEventsConfig

    hide_numba_from_vllm()  # a replay may have loaded it
    make_model(MODELS, "tiny")
    sockets = f"ipc://{tmp_path_factory.mktemp('events')}"
    extra = {
        "kv_events_endpoint": f"{sockets}/ours",
        "kv_events_replay_endpoint": f"{sockets}/ours-again",
        "cpu_cache_gb": 0.05,
        "ssd_cache_gb": 0.1,
        "ssd_cache_dirs": [str(tmp_path_factory.mktemp("ssd"))],
    }
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"{sockets}/vllms",
        replay_endpoint=f"{sockets}/vllms-again",
        topic="kv@pod@tiny",
    )
    llm = LLM(**engine_arguments("tiny", extra, kv_events_config=events))
    config = llm.llm_engine.vllm_config
    assert config.use_v2_model_runner is not second_runner.is_first()
    assert config.scheduler_config.async_scheduling is second_runner.schedules_ahead()
    yield Engine(llm, probe_dir)
    llm.llm_engine.engine_core.shutdown()
