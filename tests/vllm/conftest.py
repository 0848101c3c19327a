"""Tests on a real vLLM engine; they skip, and say so, where vLLM is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "scripts")]

from engines import ENGINE_ENV, MODELS, engine_arguments  # noqa: E402

collect_ignore: list[str] = []
try:
    import vllm  # noqa: F401
except ImportError:
    if os.environ.get("REQUIRE_VLLM"):
        raise
    collect_ignore = ["test_engine.py", "test_processes.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


class Engine:
    """An engine in this process, and what a test asks of it."""

    def __init__(self, llm: Any, probe_dir: Path) -> None:
        self.llm = llm
        self.probe_dir = probe_dir

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        return self.scheduler.connector._scheduler.manager

    def generate(self, prompt: list[int], max_tokens: int = 8, **extra: Any) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = {"prompt_token_ids": prompt, **extra}
        return self.llm.generate([request], sampling, use_tqdm=False)[0]

    def drain(self) -> None:
        """Let puts end: in one process nobody else steps an idle engine."""
        for _ in range(10_000):
            if not self.scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine did not come to rest")

    def settle(self) -> None:
        """Wait until what was stored is on SSD too."""
        self.drain()
        server = self.manager._server
        with server.session() as engine:
            while engine.num_open_tasks:
                server.wait_for_change(0.05)

    def forget_gpu(self) -> None:
        self.drain()
        assert self.llm.reset_prefix_cache()

    def forget_all(self) -> None:
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)


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
