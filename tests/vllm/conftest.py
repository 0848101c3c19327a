"""Tests on a real vLLM engine; they skip, and say so, where vLLM is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "scripts")]

from engines import ENGINE_ENV, MODELS, Engine, engine_arguments  # noqa: E402

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
    os.environ.update(ENGINE_ENV, VLLM_ENABLE_V1_MULTIPROCESSING="0", KV_PROBE_DIR=str(probe_dir))
    from make_models import make_model
    from vllm import LLM

    make_model(MODELS, "tiny")
    extra = {
        "cpu_cache_gb": 0.05,
        "ssd_cache_gb": 0.1,
        "ssd_cache_dirs": [str(tmp_path_factory.mktemp("ssd"))],
    }
    llm = LLM(**engine_arguments("tiny", extra))
    yield Engine(llm, probe_dir)
    llm.llm_engine.engine_core.shutdown()
