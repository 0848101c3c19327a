"""Loads layer by layer within vLLM's step, beside loads between steps: the 136 M model, from DRAM.

    python benchmarks/bench_layerwise.py [--only one|four] [--tokens 1000 4000 7900] [--rounds 15]

One engine; the ways of `layerwise_load` alternate from round to round. A load that is not whole,
or leaves other bytes on the GPU than were computed, ends the benchmark; so do, for one request,
other tokens than without a load. (With four, tokens depend on who is in the batch, loads or not.)

* one: TTFT of one request on an idle engine, with so many tokens cached and a few or many new ones.
* four: four requests of 2,000 cached tokens each, all at once or one every three steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import defaultdict
from statistics import median, quantiles
from typing import Any

import search_path  # noqa: F401
from engines import fast_dtype, make_prompt
from make_models import make_model
from paths import MODELS

WAYS = ("off", "on", "auto")
BLOCK = 32
NUM_NEW = (10, 256)
NUM_REQUESTS = 4
FOUR_TOKENS = 2000
FOUR_ANSWER = 12
PACES = {"at once": 0, "one every 3 steps": 3}

Seen = dict[str, list[float]]


class Bench:
    """An engine whose ``layerwise_load`` can be changed between requests."""

    def __init__(self) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            model=str(make_model(MODELS, "mid")),
            dtype=fast_dtype(),
            enforce_eager=True,
            max_model_len=8192,
            max_num_seqs=NUM_REQUESTS,
            block_size=BLOCK,
            kv_cache_memory_bytes=1 << 30,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="FlexCacheConnectorV1",
                kv_connector_module_path="flexcache.integration.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"cpu_cache_gb": 2},
            ),
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._ids = itertools.count()
        self._computed: dict[bytes, str] = {}
        self._loaded: dict[bytes, int] = {}
        self._watch()

    def _watch(self) -> None:
        """Note which GPU block is to hold what, when it was loaded, and when it is stored."""
        side = self._scheduler.connector._scheduler
        allocated, finished = side.allocated, side.finished

        def note_load(request: Any, tables: list[list[int]], num_external: int) -> None:
            allocated(request, tables, num_external)
            if num_external:
                num_blocks = num_external // BLOCK
                self._loaded.update(
                    zip(request.block_hashes[:num_blocks], tables[0][:num_blocks], strict=True)
                )

        def note_end(request: Any, tables: list[list[int]]) -> bool:
            for key, block in zip(request.block_hashes, tables[0], strict=False):
                if key not in self._computed:
                    self._computed[key] = self._digest(block)
            return bool(finished(request, tables))

        side.allocated, side.finished = note_load, note_end

    def _digest(self, block: int) -> str:
        from probe_connector import digest_block
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return digest_block(get_kv_transfer_group()._worker.client._tensors._kv_caches, block)

    def check_bytes(self, num_blocks: int) -> None:
        """What was loaded since the last call is what was computed once."""
        loaded, self._loaded = self._loaded, {}
        assert len(loaded) >= num_blocks, f"{len(loaded)} of {num_blocks} blocks were loaded"
        for key, block in loaded.items():
            if self._digest(block) != self._computed[key]:
                raise SystemExit(f"block {key.hex()} has other bytes than were computed")

    def use(self, way: str) -> None:
        from flexcache.integration.adapter import LayerwiseRule

        self._scheduler.connector._scheduler.gets.layerwise = LayerwiseRule(way, None)

    def forget_gpu(self) -> None:
        while self._scheduler.has_requests():  # puts
            self._engine.step()
        assert self._llm.reset_prefix_cache()

    def store_nothing(self) -> None:
        """So that what is new in a prompt stays new."""
        self._scheduler.connector._scheduler._cache.match_put = lambda *arguments: None

    def serve(
        self, prompts: list[list[int]], num_tokens: int, steps_between: int = 0
    ) -> tuple[list[list[int]], Seen]:
        """Serve the prompts, each so many steps after the last; their tokens, and what was seen."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        last_s: dict[str, float] = {}
        seen: Seen = defaultdict(list)
        began_s = time.perf_counter()
        for step in itertools.count():
            while len(tokens) < len(prompts) and step >= len(tokens) * steps_between:
                request = str(next(self._ids))
                prompt = {"prompt_token_ids": prompts[len(tokens)]}
                tokens[request], last_s[request] = [], time.perf_counter()
                self._engine.add_request(request, prompt, sampling)
            if len(tokens) == len(prompts) and not self._engine.has_unfinished_requests():
                break
            for output in self._engine.step():
                now, request = time.perf_counter(), output.request_id
                seen["gap" if tokens[request] else "ttft"].append(now - last_s[request])
                last_s[request], tokens[request] = now, list(output.outputs[0].token_ids)
                if output.finished:
                    seen["cached"].append(output.num_cached_tokens)
        seen["total"].append(time.perf_counter() - began_s)
        return list(tokens.values()), seen

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def alternate(
    bench: Bench, rounds: int, prompts: list[list[int]], num_cached: int, num_tokens: int,
    steps_between: int = 0,
) -> dict[str, Seen]:  # fmt: skip
    """What was seen with each way; the prompts' KV lies on the GPU before, not so after."""
    expected, _ = bench.serve(prompts, num_tokens, steps_between)
    same_tokens = len(prompts) == 1
    results: dict[str, Seen] = {way: defaultdict(list) for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            bench.forget_gpu()
            bench.use(way)
            tokens, seen = bench.serve(prompts, num_tokens, steps_between)
            if (same_tokens and tokens != expected) or min(seen["cached"]) < num_cached:
                raise SystemExit(f"{way}: {seen['cached']} tokens cached, {tokens} {expected}")
            bench.check_bytes(num_cached // BLOCK * len(prompts))
            for what, values in seen.items() if turn else ():  # the first warms up
                results[way][what].extend([max(values)] if what == "gap" else values)
    return results


def show(label: str, results: dict[str, Seen], what: str) -> None:
    base = median(results["off"][what])
    for way, seen in results.items():
        low, middle, high = quantiles(seen[what], n=4)
        print(
            f"| {label} | {way} | {middle * 1e3:.1f} ms | {low * 1e3:.1f} to {high * 1e3:.1f} "
            f"| {middle / base:.3f} |",
            flush=True,
        )


def bench_one(bench: Bench, lengths: list[int], rounds: int) -> None:
    whole = make_prompt(max(lengths), seed=1)
    bench.serve([whole], 2)
    bench.store_nothing()
    for num_new, length in itertools.product(NUM_NEW, lengths):
        num_cached = length // BLOCK * BLOCK
        asked = whole[:num_cached] + make_prompt(num_new, seed=length)
        bench.forget_gpu()
        bench.use("off")
        bench.serve([whole], 2)
        results = alternate(bench, rounds, [asked], num_cached, 2)
        show(f"TTFT, {num_cached} cached + {num_new}", results, "ttft")


def bench_four(bench: Bench, rounds: int) -> None:
    prompts = [make_prompt(FOUR_TOKENS, seed=seed) for seed in range(1, NUM_REQUESTS + 1)]
    bench.serve(prompts, FOUR_ANSWER)
    for pace, steps_between in PACES.items():
        num_cached = FOUR_TOKENS // BLOCK * BLOCK
        results = alternate(bench, rounds, prompts, num_cached, FOUR_ANSWER, steps_between)
        show(f"four, {pace}: all done", results, "total")
        show(f"four, {pace}: TTFT", results, "ttft")
        show(f"four, {pace}: longest gap", results, "gap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["one", "four"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 7900])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part-mb", type=float, help="size of the parts that a load comes in")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="that compute; fewer than cores leave one to the copies")  # fmt: skip
    args = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS=str(args.threads),
        TORCH_COMPILE_DISABLE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    if args.part_mb is not None:
        from flexcache.transfer import device_worker

        device_worker._MIN_PART_BYTES = int(args.part_mb * 1e6)
    bench = Bench()
    print("| what | layerwise_load | median | quartiles | of off |")
    print("| --- | --- | ---: | ---: | ---: |")
    if args.only != "four":
        bench_one(bench, args.tokens, args.rounds)
    if args.only != "one":
        bench_four(bench, args.rounds)
    bench.close()


if __name__ == "__main__":
    main()
