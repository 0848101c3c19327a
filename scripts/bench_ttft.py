"""TTFT of the 136 M model: cold, from DRAM, from SSD; FlexCache beside vLLM's own offloading.

    python scripts/bench_ttft.py [--tokens 1000 4000] [--rounds 3]

Each system runs in a process of its own on the same machine, one after the other. Every prompt is
new; after its cold run the GPU cache is dropped, and the same prompt is asked again. A hit whose
tokens differ from the cold run's ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = {"FlexCache": "flexcache", "vLLM's own offloading": "vllm"}


def has_fast_bf16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def connector(system: str, work_dir: str) -> Any:
    from vllm.config import KVTransferConfig

    if system == "flexcache":
        return KVTransferConfig(
            kv_connector="FlexCacheConnectorV1",
            kv_connector_module_path="flexcache.integration.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "cpu_cache_gb": 2,
                "ssd_cache_gb": 4,
                "ssd_cache_dirs": [work_dir],
            },
        )
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "HostTieringSpec",
            "spec_module_path": "vllm_offload_cpu",
            "cpu_bytes_to_use": 2_000_000_000,
            "secondary_tiers": [{"type": "fs", "root_dir": work_dir}],
        },
    )


def run_engine(
    system: str, lengths: list[int], rounds: int, work_dir: str, reload: bool
) -> dict[str, Any]:
    """One engine's measurements: {"<tokens> <what>": [seconds, ...]}.

    With ``reload`` the engine is a second one over the files that a first one left.
    """
    from demo import prompt
    from make_models import make_model
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(make_model(ROOT / ".models", "mid")),
        dtype="bfloat16" if has_fast_bf16() else "float32",
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=4,
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        kv_transfer_config=connector(system, work_dir),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def ask(tokens: list[int]) -> tuple[float, list[int], int]:
        request = [{"prompt_token_ids": tokens}]
        output = llm.generate(request, sampling, use_tqdm=False)[0]
        seconds = output.metrics.first_token_latency
        for _ in range(2000):  # lets stores end; in one process nobody else steps the engine
            if not scheduler.has_requests():
                break
            llm.llm_engine.step()
        return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens

    results: dict[str, list[float]] = {}
    ask(prompt(64, seed=99))
    for length in lengths:
        for turn in range(rounds):
            tokens = prompt(length, seed=length + turn)
            if reload:
                seconds, _, cached = ask(tokens)
                if cached < length - 64:
                    raise SystemExit(f"{system}: only {cached} tokens came from the files")
                results.setdefault(f"{length} SSD", []).append(seconds)
                continue
            cold, expected, _ = ask(tokens)
            results.setdefault(f"{length} cold", []).append(cold)
            for what in ("DRAM", "SSD"):
                if what == "SSD":
                    if system != "flexcache":
                        continue  # its DRAM cannot be dropped alone: see reload
                    manager = scheduler.connector._scheduler.manager
                    while manager.stats()["tiers"]["SSD"]["leased"]:
                        pass
                    manager.clear("CPU")
                ask(prompt(40, seed=7))
                assert llm.reset_prefix_cache()
                seconds, got, cached = ask(tokens)
                if got != expected or cached < length - 64:
                    raise SystemExit(f"{system} {what}: {cached} tokens cached, {got} {expected}")
                results.setdefault(f"{length} {what}", []).append(seconds)
    llm.llm_engine.engine_core.shutdown()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=SYSTEMS.values(), help=argparse.SUPPRESS)
    parser.add_argument("--dir", help=argparse.SUPPRESS)
    parser.add_argument("--reload", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        results = run_engine(args.engine, args.tokens, args.rounds, args.dir, args.reload)
        print("RESULT " + json.dumps(results))
        return
    results = {}
    for name, system in SYSTEMS.items():
        print(f"measuring {name} ...", flush=True)
        work_dir = tempfile.mkdtemp(prefix="flexcache-bench-", dir=ROOT)
        try:
            results[name] = spawn(system, args.tokens, args.rounds, work_dir)
            if system == "vllm":  # a second engine reads what the first left on disk
                again = spawn(system, args.tokens, args.rounds, work_dir, "--reload")
                results[name].update(again)
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
    print("| tokens | run | " + " | ".join(f"{n} | of its cold" for n in results) + " |")
    print("| --- | --- |" + " ---: | ---: |" * len(results))
    for length in args.tokens:
        for what in ("cold", "DRAM", "SSD"):
            cells = []
            for measured in results.values():
                if not measured or f"{length} {what}" not in measured:
                    cells.append("did not run | ")
                    continue
                seconds = median(measured[f"{length} {what}"])
                ratio = seconds / median(measured[f"{length} cold"])
                cells.append(f"{seconds:.3f} s | {ratio:.2%}")
            print(f"| {length} | {what} | " + " | ".join(cells) + " |")


def spawn(
    system: str, lengths: list[int], rounds: int, work_dir: str, *options: str
) -> dict[str, Any]:
    path = [str(ROOT / "scripts"), str(ROOT / "scripts" / "peers")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, __file__, "--engine", system, "--dir", work_dir]
    command += [*options, "--rounds", str(rounds), "--tokens", *map(str, lengths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    print(f"{system} did not run:\n{(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
    return {}


if __name__ == "__main__":
    main()
