"""A vLLM engine in its own process that executes commands, and can be killed.

Run as ``python driven_engine.py SETTINGS SOCKET``: scheduler and worker are in the one process, so
the driver decides when the engine steps. It receives JSON objects on the socket, a file descriptor
that it has inherited, answers each, and shuts down in an orderly way when there are no more.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import secondary_tier_calls
from engine_soak import Soak
from engines import ENGINE_ENV, Engine, Settings, clear_lmcache, llm_arguments
from paths import MODELS, ROOT, SUPPORT, python_path
from preloaded import ForkedProcess
from users import Answer, Turn, converse

STOP_S = 120.0
ABORTED_AFTER_STEPS = 10
RESET_EVERY_STEPS = 7
_TEST_ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 32 << 20,
    "seed": 0,
}


class DidNotRun(Exception):
    """An engine does not start, or has ended; the message has the reason."""


class DrivenEngine:
    """Starts the process; `wait_ready` before the first call.

    Args:
        log: File that the engine's output is appended to.
        python: Interpreter of the environment it runs in. If None, it is forked from a process that
            has made vLLM's imports, and computes with one thread.
        packages: Further directories of packages.
    """

    def __init__(
        self,
        settings: Settings,
        log: Path,
        python: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        from make_models import make_model

        make_model(MODELS, settings.model)  # not by the engine's process, which would be older
        self.settings = settings
        self._log = log
        self._runtime_dir = tempfile.TemporaryDirectory(prefix="fc-")  # socket paths must be short
        path = python_path(ROOT, SUPPORT, ROOT / "benchmarks" / "peers", *packages)
        environment = {
            **os.environ,
            **ENGINE_ENV,
            "OMP_NUM_THREADS": str(settings.num_threads or len(os.sched_getaffinity(0))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": path,
            "XDG_RUNTIME_DIR": self._runtime_dir.name,
        }
        if settings.probe_dir is not None:
            environment["KV_PROBE_DIR"] = settings.probe_dir
        self._socket, theirs = multiprocessing.Pipe()
        self._process = start_driven(settings, log, python, environment, theirs)
        theirs.close()

    def wait_ready(self) -> None:
        """Raises `DidNotRun`."""
        self._answer()

    def ask(self, tokens: Sequence[int], num_generated: int = 2) -> dict[str, Any]:
        """Serve one prompt: ``ttft_s``, ``tokens`` generated, ``cached`` tokens of the prompt."""
        return dict(self._call("ask", tokens=list(tokens), num_generated=num_generated))

    def generate(
        self,
        prompt: list[int],
        num_generated: int = 8,
        adapter: str | None = None,
        reloads: bool = False,
    ) -> tuple[list[int], int]:
        """Return tokens, and how many of the prompt came from a cache.

        Args:
            adapter: Directory of a LoRA adapter.
            reloads: Whether vLLM is to load it again (``load_inplace``).
        """
        seen = self._call(
            "ask", tokens=prompt, num_generated=num_generated, drains=False, adapter=adapter,
            reloads=reloads,
        )  # fmt: skip
        return seen["tokens"], seen["cached"]

    def time_batch(self, prompts: list[list[int]]) -> float:
        """Serve the prompts, as many at once as the engine takes; return the seconds it took."""
        return float(self._call("time_batch", prompts=prompts))

    def serve(
        self, prompts: Sequence[Sequence[int]], num_generated: int, without: str | None = None
    ) -> dict[str, float]:
        """Serve new prompts, until what they leave behind is stored.

        Args:
            without: What is taken out for the time: "cache", the whole KV connector; "watchers",
                FlexCache's KV events and trace.

        Returns:
            ``wall_s``, and ``cpu_s`` of the process and its children.
        """
        return dict(
            self._call("serve", prompts=prompts, num_generated=num_generated, without=without)
        )

    def converse(
        self, sessions: Sequence[Sequence[Turn]], num_users: int, think_s: float
    ) -> tuple[list[Answer], float]:
        """Let users ask all turns of the sessions; return the answers, and the seconds it took."""
        seen = self._call("converse", sessions=sessions, num_users=num_users, think_s=think_s)
        return [Answer(**each) for each in seen["answers"]], seen["took_s"]

    def open_gates_late(self, num_steps: int) -> None:
        """Let copies between steps begin this many steps later than they could."""
        self._call("open_gates_late", num_steps=num_steps)

    def answers(
        self, prompts: list[list[int]], num_generated: int, without: str | None = None,
        aborted: Sequence[int] = (), resets: bool = False, kill: int = 0, updated: str = "",
    ) -> dict[int, list[int]]:  # fmt: skip
        """Serve prompts together until nothing is left to do; return the tokens by position.

        Args:
            without: As for `serve`.
            aborted: Positions of prompts that are aborted on the way.
            resets: Whether the caches are reset again and again meanwhile, at every other time
                with the running requests.
            kill: A process to kill while FlexCache copies from the GPU.
            updated: A checkpoint whose weights the engine is given once all prompts run.
        """
        seen = self._call(
            "answers", prompts=prompts, num_generated=num_generated, without=without,
            aborted=list(aborted), resets=resets, kill=kill, updated=updated,
        )  # fmt: skip
        return {int(position): tokens for position, tokens in seen.items()}

    def soak(
        self, prompts: Sequence[tuple[list[int], list[int]]], seconds: float, seed: int, ssd: str
    ) -> dict[str, int]:
        """Ask at random, as `Soak` does, and return what it counts."""
        return dict(self._call("soak", prompts=prompts, seconds=seconds, seed=seed, ssd=ssd))

    def damage_loads(self, group: int) -> None:
        """Change a byte in DRAM of each block of a KV cache group that is loaded from now on."""
        self._call("damage_loads", group=group)

    def copy_after_match(self, source: Path, target: Path) -> None:
        """Copy a file once blocks for the next request were looked for, before any are loaded."""
        self._call("copy_after_match", source=str(source), target=str(target))

    def gpu_blocks(self) -> dict[str, int]:
        """Number of blocks: ``free``, and ``all`` that requests can have."""
        return dict(self._call("gpu_blocks"))

    def update(self, path: str, way: str = "reload_weights") -> None:
        """Give the engine other weights, and leave its caches alone.

        Args:
            way: "reload_weights", vLLM's own; or "load_weights", the model's, which RL frameworks
                call.
        """
        self._call("update", path=path, way=way)

    def new_weights(self, version: str) -> None:
        """Name the engine's weights, as a trainer does."""
        self._call("new_weights", version=version)

    def reset(self) -> None:
        """Reset the engine's caches as vLLM's documentation says, with ``reset_connector``."""
        self._call("reset")

    def settle(self) -> None:
        """Wait until what was stored is in every tier."""
        self._call("settle")

    def forget(self, tier: str) -> None:
        """Drop what the engine's GPU memory holds, for "states" only those; or for "DRAM" that tier
        as well."""
        self._call("forget", tier=tier)

    def stats(self) -> dict[str, Any]:
        """`KVManager.stats`; empty for the other systems."""
        return dict(self._call("stats"))

    def metric(self, name: str) -> float:
        """Value of one of vLLM's Prometheus counters."""
        return float(self._call("metric", name=name))

    def transfer(
        self, prompt: list[int], params: dict[str, Any], num_generated: int = 8
    ) -> dict[str, Any]:
        """Serve a prompt that another engine has computed, or will decode.

        Args:
            params: Its ``kv_transfer_params``.

        Returns:
            ``tokens``; ``cached`` ones of the prompt; ``params`` for the other engine.
        """
        return dict(
            self._call("transfer", tokens=prompt, params=params, num_generated=num_generated)
        )

    def tier(self, call: str) -> Any:
        """Call a function of `secondary_tier_calls`."""
        return self._call("tier", call=call)

    def kill(self) -> None:
        """Kill the engine and its workers at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Stop in an orderly way, or kill what does not end. A killed engine may be stopped."""
        self._socket.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._runtime_dir.cleanup()

    def _call(self, command: str, **arguments: Any) -> Any:
        with suppress(BrokenPipeError):  # `_answer` raises with the reason
            self._socket.send_bytes(json.dumps({"command": command, **arguments}).encode())
        return self._answer()

    def _answer(self) -> Any:
        with suppress(EOFError, ConnectionResetError):
            return json.loads(self._socket.recv_bytes())
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        raise DidNotRun("\n".join([*(errors[-1:] or ["the engine has ended"]), *lines[-30:]]))


def start_driven(
    settings: Settings, log: Path, python: str | None, environment: dict[str, str],
    socket: Connection,
) -> ForkedProcess | subprocess.Popen[bytes]:  # fmt: skip
    """Start the process of a `DrivenEngine`."""
    if python is None:
        return ForkedProcess("vllm_imports", environment, main, settings, socket, log=log)
    with log.open("ab") as output:
        return subprocess.Popen(
            [python, __file__, json.dumps(asdict(settings)), str(socket.fileno())],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, pass_fds=[socket.fileno()],
        )  # fmt: skip


@contextmanager
def running(engine: DrivenEngine) -> Iterator[DrivenEngine]:
    """Run an engine that is ready inside the block and gone after it."""
    with ExitStack() as stack:
        stack.callback(engine.stop)
        engine.wait_ready()
        yield engine


@contextmanager
def driven_engines(
    *configs: dict[str, Any], probe_dir: Path | None, log: Path, model: str = "tiny"
) -> Iterator[list[DrivenEngine]]:
    """Run small engines with FlexCache. They start at the same time."""
    probes = None if probe_dir is None else str(probe_dir)
    with ExitStack() as stack:
        engines = []
        for config in configs:
            settings = Settings(
                "FlexCache", model, dram_gb=None, more=config, engine=_TEST_ENGINE,
                probe_dir=probes, num_threads=1,
            )  # fmt: skip
            engines.append(DrivenEngine(settings, log))
            stack.callback(engines[-1].stop)
        for engine in engines:
            engine.wait_ready()
        yield engines


class Commands(Engine):
    """The engine inside the process, and the commands that it executes."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        if settings.has_groups:
            import mamba_on_cpu  # noqa: F401  patches vLLM
        super().__init__(LLM(**llm_arguments(settings)), Path(settings.probe_dir or os.devnull))
        self._settings = settings

    @property
    def manager(self) -> Any:
        """FlexCache's manager; None for other systems, and while the connector is hidden."""
        is_ours = self._settings.system == "FlexCache" and self.scheduler.connector is not None
        return super().manager if is_ours else None

    def ask(
        self, tokens: list[int], num_generated: int, drains: bool = True,
        adapter: str | None = None, reloads: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        self.adapter, self.reloads = adapter, reloads
        output = self.generate(tokens, num_generated)
        if drains:
            self.drain()
        return {
            "ttft_s": output.metrics.first_token_latency,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
        }

    def time_batch(self, prompts: list[list[int]]) -> float:
        started = time.monotonic()
        self.generate_all(prompts)
        return time.monotonic() - started

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
            outputs = self.generate_all(prompts, num_generated)
            self.settle()
            took = {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s() - cpu_before}
        assert all(len(output.outputs[0].token_ids) == num_generated for output in outputs)
        assert sum(output.num_cached_tokens or 0 for output in outputs) == 0, "a prompt was known"
        return took

    def converse(
        self, sessions: list[list[Turn]], num_users: int, think_s: float
    ) -> dict[str, Any]:
        answers, took_s = converse(self.llm.llm_engine, sessions, num_users, think_s)
        self.settle()
        return {"answers": [asdict(answer) for answer in answers], "took_s": took_s}

    def open_gates_late(self, num_steps: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        open_gates, take_received = worker.client.open_gates, worker.take_received
        waiting: deque[list[int]] = deque([[] for _ in range(num_steps)])

        def step() -> Any:
            waiting.append([])
            open_gates(waiting.popleft())
            return take_received()

        worker.client.open_gates = lambda task_ids: waiting[-1].extend(task_ids)
        worker.take_received = step

    def damage_loads(self, group: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from flexcache.ids import OpKind
        from flexcache.transfer.messages import Execute, groups_of, unpack_ids

        worker = get_kv_transfer_group()._worker.client._worker
        execute, places = worker.execute, worker._addresses

        def damage_and_execute(message: Execute) -> None:
            if message.kind is OpKind.H2D:
                units = unpack_ids(message.src)
                named = unpack_ids(message.dst).reshape(len(units), -1)
                for row, place in np.argwhere(groups_of(named) == group):
                    unit = places._segment.block(int(units[row]))
                    unit[place * places._block_bytes] ^= 0xFF
            execute(message)

        worker.execute = damage_and_execute

    def answers(
        self, prompts: list[list[int]], num_generated: int, without: str | None,
        aborted: list[int], resets: bool, kill: int, updated: str,
    ) -> dict[int, list[int]]:  # fmt: skip
        from vllm import SamplingParams

        engine, tokens = self.llm.llm_engine, {}
        sampling = SamplingParams(temperature=0, max_tokens=num_generated, ignore_eos=True)
        with self._alone() if without == "cache" else nullcontext():
            for position, prompt in enumerate(prompts):
                engine.add_request(str(position), {"prompt_token_ids": prompt}, sampling)
            for number in itertools.count():
                if not engine.has_unfinished_requests():
                    break
                for output in engine.step():
                    if output.finished:
                        tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
                if number == ABORTED_AFTER_STEPS:
                    engine.abort_request([str(position) for position in aborted])
                if resets and number % RESET_EVERY_STEPS == 0:
                    preempts = number // RESET_EVERY_STEPS % 2 == 1
                    try:
                        self.llm.reset_prefix_cache(preempts, reset_connector=True)
                    except RuntimeError as error:
                        # vLLM refuses while a request waits for a load; those that ran go on.
                        if "waiting for remote KV transfer" not in str(error):
                            raise
                if kill and self.scheduler.connector.has_pending_push_work():
                    os.kill(kill, signal.SIGKILL)
                    kill = 0
                if updated and len(self.scheduler.running) == len(prompts):
                    self.update(updated, "reload_weights")
                    updated = ""
            self.drain()
        assert not updated, "they did not run together"
        return {position: seen for position, seen in tokens.items() if position not in aborted}

    def soak(self, prompts: Any, seconds: float, seed: int, ssd: str) -> dict[str, int]:
        return Soak(self, prompts, Path(ssd), seed).run(seconds)

    def copy_after_match(self, source: str, target: str) -> None:
        connector = self.connector
        allocated = connector.update_state_after_alloc

        def copy_and_go_on(request: Any, blocks: Any, num_external_tokens: int) -> None:
            shutil.copy(source, target)
            connector.update_state_after_alloc = allocated
            allocated(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = copy_and_go_on

    def gpu_blocks(self) -> dict[str, int]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return {"free": pool.get_num_free_blocks(), "all": pool.num_gpu_blocks - 1}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hide the connector from scheduler and worker."""
        taken, self.scheduler.connector = self.scheduler.connector, None
        try:
            with self._hidden_from_worker():
                yield
        finally:
            self.scheduler.connector = taken

    @contextmanager
    def _hidden_from_worker(self) -> Iterator[None]:
        from vllm.distributed.kv_transfer import kv_transfer_state

        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        connector = getattr(executor.driver_worker.worker.model_runner, "kv_connector", None)
        if connector is not None:  # vLLM's second runner keeps it
            connector.set_disabled(True)
            yield
            connector.set_disabled(False)
            return
        taken, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
        yield
        kv_transfer_state._KV_CONNECTOR_AGENT = taken

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Run as if neither KV events nor a trace were enabled."""
        from flexcache.ids import PromptDetail

        transport = self.manager._transport
        tasks = transport.server.hub.cache.tasks
        tiers, before = tasks.cache.tiers, (transport.prompt_detail, tasks.accounts.recorder)
        followers = [(tier.on_stored, tier.index.on_removed) for tier in tiers]
        transport.prompt_detail, tasks.accounts.recorder = PromptDetail.NOTHING, None
        for tier in tiers:
            tier.on_stored, tier.index.on_removed = [], []
        try:
            yield
        finally:
            transport.prompt_detail, tasks.accounts.recorder = before
            for tier, (on_stored, on_removed) in zip(tiers, followers, strict=True):
                tier.on_stored, tier.index.on_removed = on_stored, on_removed

    def settle(self) -> None:
        """Wait until every tier (with vLLM's own offloading, DRAM) has what was stored."""
        if self.manager is None:
            self.drain()
        elif "endpoint" in self._settings.more:
            self.manager.wait_ready(STOP_S)  # its server may have been restarted
            self.drain()
            while any(self.manager.stats()["tasks"].values()):
                time.sleep(0.01)
        else:
            super().settle()

    def _forget_states(self) -> None:
        """As vLLM does for new blocks, where the states were used longest ago."""
        from vllm.v1.core.kv_cache_utils import get_group_id
        from vllm.v1.kv_cache_interface import MambaSpec

        manager = self.scheduler.kv_cache_manager
        groups = manager.kv_cache_config.kv_cache_groups
        for block in manager.block_pool.blocks:
            if block.block_hash is None or block.ref_cnt:
                continue
            if isinstance(groups[get_group_id(block.block_hash)].kv_cache_spec, MambaSpec):
                assert manager.block_pool._maybe_evict_cached_block(block)

    def forget(self, tier: str) -> None:
        self.settle()
        if tier == "states":
            self._forget_states()
            return
        if tier == "DRAM" and self.manager is not None:
            self.manager.clear("CPU")
        if tier == "DRAM" and self._settings.system == "LMCache":
            clear_lmcache(self._settings)
        # vLLM's own offloading drops its DRAM with this, and keeps its files.
        theirs = tier == "DRAM" and self._settings.system == "offloading"
        assert self.llm.reset_prefix_cache(reset_connector=theirs)
        if theirs:
            self.tier("keep_names")

    def reset(self) -> None:
        self.drain()
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def update(self, path: str, way: str) -> None:
        if way == "reload_weights":
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            return
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.reload import layerwise

        weights = load_file(Path(path) / "model.safetensors")

        def load(model: Any) -> None:  # the CPU backend keeps weights in a form of its own
            layerwise.initialize_layerwise_reload(model)
            model.load_weights(iter(weights.items()))
            layerwise.finalize_layerwise_reload(model, self.llm.llm_engine.model_config)

        self.llm.apply_model(load)

    def new_weights(self, version: str) -> None:
        self.manager.new_weights(version)

    def stats(self) -> dict[str, Any]:
        return {} if self.manager is None else self.manager.stats()

    def metric(self, name: str) -> float:
        return float(sum(m.value for m in self.llm.get_metrics() if m.name == name))

    def transfer(
        self, tokens: list[int], params: dict[str, Any], num_generated: int
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=num_generated, ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )  # fmt: skip
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "params": output.kv_transfer_params,
        }

    def tier(self, call: str) -> Any:
        return getattr(secondary_tier_calls, call)(self)


def main(settings: Settings, socket: Connection) -> None:
    commands = Commands(settings)
    _ = commands.manager  # waits until the cache is open

    def answer(value: Any) -> None:
        socket.send_bytes(json.dumps(value).encode())

    answer("ready")
    with suppress(EOFError):
        while True:
            request = json.loads(socket.recv_bytes())
            answer(getattr(commands, request.pop("command"))(**request))
    commands.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])), Connection(int(sys.argv[2])))
