"""Tests on a real vLLM engine; they skip, with the reason, if vLLM is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_systems import hide_numba_from_vllm
from engines import ENGINE_ENV, Engine, engine_arguments
from paths import MODELS

os.environ.update(ENGINE_ENV)  # before vLLM is imported: OpenMP would wait on every core for work

collect_ignore: list[str] = []
try:
    import vllm  # noqa: F401
except ImportError:
    if os.environ.get("REQUIRE_VLLM"):
        raise
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


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
    yield Engine(llm, probe_dir)
    llm.llm_engine.engine_core.shutdown()
