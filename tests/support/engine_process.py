"""A vLLM engine in its own process that executes commands, for measuring TTFT and overhead.
Engines of several systems run side by side and take turns.

Run as ``python engine_process.py SETTINGS``; takes a JSON object a line, answers each with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paths import MODELS, ROOT, SUPPORT

LMCACHE_SETTLES_S = 0.3
_MARK = "ANSWER "  # vLLM writes to standard output too
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class DidNotRun(Exception):
    """An engine does not start, or has ended; the message has the reason."""


@dataclass(frozen=True)
class Settings:
    """An engine and what it caches with.

    Attributes:
        system: "alone" (vLLM without a KV connector), "FlexCache", "offloading" (vLLM's own) or
            "LMCache".
        model: As `make_models` has them.
        directory: For the SSD tier; none if None.
        dram_gb: Size of the DRAM tier.
        peer_url: Of LMCache's server.
        more: Further settings of FlexCache.
    """

    system: str
    model: str
    directory: str | None = None
    dram_gb: float = 1.0
    peer_url: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


class EngineProcess:
    """Starts the process; `wait_ready` before the first call.

    Args:
        python: Interpreter of the environment it runs in.
        log: What the engine says is appended to it.
    """

    def __init__(self, settings: Settings, log: Path, python: str = sys.executable) -> None:
        self.settings = settings
        self._log = log
        path = [str(ROOT), str(SUPPORT), str(ROOT / "benchmarks" / "peers")]
        threads = str(len(os.sched_getaffinity(0)))
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [python, __file__, json.dumps(asdict(settings))],
                env={
                    **os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": threads,
                    "PYTHONPATH": os.pathsep.join(path),
                },
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Raises `DidNotRun`."""
        self._answer()

    def ask(self, tokens: Sequence[int]) -> dict[str, Any]:
        """One prompt: ``ttft_s``, ``tokens`` generated, ``cached`` tokens of the prompt."""
        return dict(self._call("ask", tokens=list(tokens)))

    def serve(
        self, prompts: Sequence[Sequence[int]], num_generated: int, without: str | None = None
    ) -> dict[str, float]:
        """All prompts at once, until what they leave behind is stored.

        Args:
            without: What is taken out for the time: "cache", the whole KV connector; "watchers",
                FlexCache's KV events and trace.

        Returns:
            ``wall_s``, and ``cpu_s`` of the process and its children.
        """
        return dict(
            self._call("serve", prompts=prompts, num_generated=num_generated, without=without)
        )

    def settle(self) -> None:
        """Wait until what was stored is in every tier."""
        self._call("settle")

    def forget(self, tier: str) -> None:
        """Drop what the engine's GPU memory holds, or for "DRAM" that tier as well."""
        self._call("forget", tier=tier)

    def stats(self) -> dict[str, Any]:
        """`KVManager.stats`; empty for the other systems."""
        return dict(self._call("stats"))

    def stop(self) -> None:
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` says why
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line for line in lines if "Error" in line]
        raise DidNotRun(said[-1][-300:] if said else "it ended without a word")


@contextmanager
def running(engine: EngineProcess) -> Iterator[EngineProcess]:
    """Run engines that are ready inside the block and gone after it."""
    with ExitStack() as stack:
        stack.callback(engine.stop)
        engine.wait_ready()
        yield engine


class Engine:
    """The engine inside the process, and its commands."""

    def __init__(self, settings: Settings) -> None:
        from make_models import make_model
        from vllm import LLM

        self._settings = settings
        self._llm = LLM(
            model=str(make_model(MODELS, settings.model)),
            dtype="bfloat16" if _has_fast_bf16() else "float32",
            enforce_eager=True,
            max_model_len=8192 if settings.model == "mid" else 4096,
            max_num_seqs=8,
            block_size=32,
            kv_cache_memory_bytes=512 << 20,
            disable_log_stats=False,
            **_connector(settings),
        )
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        output = self._generate([tokens], 2)[0]
        self._drain()
        return {
            "ttft_s": output.metrics.first_token_latency,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
        }

    def serve(
        self, prompts: list[list[int]], num_generated: int, without: str | None
    ) -> dict[str, float]:
        import psutil

        family = [psutil.Process(), *psutil.Process().children(recursive=True)]

        def cpu_s() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in family)

        reduced = {None: nullcontext, "cache": self._alone, "watchers": self._unwatched}[without]
        with reduced():
            started, cpu_before = time.perf_counter(), cpu_s()
            outputs = self._generate(prompts, num_generated)
            self.settle()
            took = {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s() - cpu_before}
        assert all(len(output.outputs[0].token_ids) == num_generated for output in outputs)
        assert sum(output.num_cached_tokens or 0 for output in outputs) == 0, "a prompt was known"
        return took

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hide the connector, which scheduler and worker look up at each step."""
        from vllm.distributed.kv_transfer import kv_transfer_state as worker

        taken = self._scheduler.connector, worker._KV_CONNECTOR_AGENT
        self._scheduler.connector = worker._KV_CONNECTOR_AGENT = None
        try:
            yield
        finally:
            self._scheduler.connector, worker._KV_CONNECTOR_AGENT = taken

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Run as if neither KV events nor a trace were enabled."""
        from flexcache.request_info import PromptDetail

        transport = self._manager._client.transport
        tasks = transport.server.hub.cache.engine
        tiers, before = tasks.cache.tiers, (transport.detail, tasks.recorder)
        followers = [(tier.on_stored, tier.index.on_removed) for tier in tiers]
        transport.detail, tasks.recorder = PromptDetail.NOTHING, None
        for tier in tiers:
            tier.on_stored, tier.index.on_removed = [], []
        try:
            yield
        finally:
            transport.detail, tasks.recorder = before
            for tier, (on_stored, on_removed) in zip(tiers, followers, strict=True):
                tier.on_stored, tier.index.on_removed = on_stored, on_removed

    def settle(self) -> None:
        """Wait until every tier (with vLLM's own offloading, DRAM) has what was stored."""
        self._drain()
        while self._manager is not None and any(
            tier["leased"] for tier in self._manager.stats()["tiers"].values()
        ):
            time.sleep(0.001)

    def forget(self, tier: str) -> None:
        self.settle()
        if tier == "DRAM" and self._manager is not None:
            self._manager.clear("CPU")
        if tier == "DRAM" and self._settings.system == "LMCache":
            self._clear_lmcache()
        # vLLM's own offloading drops its DRAM with this, and keeps its files.
        theirs = tier == "DRAM" and self._settings.system == "offloading"
        assert self._llm.reset_prefix_cache(reset_connector=theirs)

    def _clear_lmcache(self) -> None:
        """Once it has written its files: it drops what is in DRAM, written or not."""
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        assert self._settings.directory is not None
        directory, sizes = Path(self._settings.directory), [-1, 0]
        while sizes[-1] != sizes[-2]:
            time.sleep(LMCACHE_SETTLES_S)
            sizes.append(sum(path.stat().st_size for path in directory.rglob("*.data")))
        client = RequestClientFactory.create(self._settings.peer_url)
        client.clear(False).result(timeout=10)
        client.close()

    def stats(self) -> dict[str, Any]:
        return {} if self._manager is None else self._manager.stats()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    @property
    def _manager(self) -> Any:
        connector = self._scheduler.connector
        is_ours = self._settings.system == "FlexCache" and connector is not None
        return connector._scheduler.manager if is_ours else None

    def _generate(self, prompts: list[list[int]], num_generated: int) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_generated, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._llm.generate(requests, sampling, use_tqdm=False)

    def _drain(self) -> None:
        """Let stores end: in one process nothing else steps an idle engine."""
        for _ in range(2000):
            if not self._scheduler.has_requests():
                return
            self._llm.llm_engine.step()


def _has_fast_bf16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def _connector(settings: Settings) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for what the engine caches with."""
    from vllm.config import KVTransferConfig

    directory, dram_bytes = settings.directory, int(settings.dram_gb * 1e9)
    match settings.system:
        case "alone":
            return {}
        case "FlexCache":
            extra: dict[str, Any] = {"cpu_cache_gb": settings.dram_gb, **settings.more}
            if directory is not None:
                extra |= {"ssd_cache_gb": 4, "ssd_cache_dirs": [directory]}
            names = {
                "kv_connector": "FlexCacheConnectorV1",
                "kv_connector_module_path": "flexcache.integration.vllm",
                "kv_load_failure_policy": "recompute",
            }
        case "offloading":
            tiers = [] if directory is None else [{"type": "fs", "root_dir": directory}]
            extra = {
                "spec_name": "HostTieringSpec",
                "spec_module_path": "vllm_offload_cpu",
                "cpu_bytes_to_use": dram_bytes,
                "secondary_tiers": tiers,
            }
            names = {"kv_connector": "OffloadingConnector"}
        case "LMCache":
            _hide_from_vllm()
            host, _, port = settings.peer_url.rpartition(":")
            extra = {"lmcache.mp.host": host, "lmcache.mp.port": int(port)}
            names = {"kv_connector": "LMCacheMPConnector"}
        case other:
            raise ValueError(f"no system is called {other!r}")
    config = KVTransferConfig(**names, kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": config}


def _hide_from_vllm() -> None:
    """LMCache loads numba before vLLM's CPU backend looks through all modules for kernels, which
    stumbles over llvmlite's library wrappers: they answer to every attribute, `__dict__` too."""
    from llvmlite.binding import ffi

    wrapper = ffi._lib_wrapper
    answer = wrapper.__getattr__
    wrapper.__getattr__ = lambda self, name: {} if name == "__dict__" else answer(self, name)


def main(settings: Settings) -> None:
    engine = Engine(settings)

    def answer(value: Any) -> None:
        print(_MARK + json.dumps(value), flush=True)

    answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        answer(getattr(engine, request.pop("do"))(**request))
    engine.close()


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
