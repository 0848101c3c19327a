"""Random work for an engine with too few GPU blocks; each answer is compared with the known one."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engines import Engine

from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.slot_index import HEADER_BYTES

MOST_AT_ONCE = 12
_DAMAGED_BYTES = 1 << 16


class Soak:
    """Asks an engine, in its process, until the time is over, and then until it is at rest.

    Args:
        prompts: With the tokens that each is answered with. A request may want fewer.
        ssd: Directory of the SSD tier.
    """

    def __init__(
        self, engine: Engine, prompts: list[tuple[list[int], list[int]]], ssd: Path, seed: int
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._ssd = ssd
        self._random = random.Random(seed)
        self._open: dict[str, list[int]] = {}
        """The answers of requests under way."""
        self._num_asked = 0
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end or self._open:
            if time.monotonic() < end:
                self._ask()
                self._disturb()
            self._hear()
        self._engine.settle()
        self._engine.connector._scheduler.check_idle()
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        self.counts["leaked"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return dict(self.counts)

    def _ask(self) -> None:
        from vllm import SamplingParams

        if len(self._open) == MOST_AT_ONCE or self._random.random() < 0.4:
            return
        prompt, answer = self._random.choice(self._prompts)
        num_wanted = self._random.randint(1, len(answer))
        self._num_asked += 1
        name = f"{self._num_asked}"
        sampling = SamplingParams(temperature=0, max_tokens=num_wanted, ignore_eos=True)
        self._engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._open[name] = answer[:num_wanted]

    def _hear(self) -> None:
        for output in self._engine.llm.llm_engine.step():
            if not output.finished or output.request_id not in self._open:
                continue
            expected = self._open.pop(output.request_id)
            seen = list(output.outputs[0].token_ids)
            self.counts["right" if seen == expected else "wrong"] += 1
            if seen != expected:
                print(
                    f"WRONG {output.request_id}: {len(output.prompt_token_ids)} tokens, "
                    f"{output.num_cached_tokens} cached: {seen} instead of {expected}",
                    flush=True,
                )

    def _disturb(self) -> None:
        dice = self._random.random()
        if dice < 0.05 and self._open:
            name = self._random.choice(list(self._open))
            self._engine.llm.llm_engine.abort_request([name])
            del self._open[name]
            self.counts["aborted"] += 1
        elif dice < 0.07:
            self._reset(self._random.random() < 0.3, self._random.random() < 0.2)
        elif dice < 0.09:
            self._engine.manager.clear("CPU")
            self.counts["cleared"] += 1
        elif dice < 0.1:
            self._damage()

    def _reset(self, interrupts: bool, reaches_us: bool) -> None:
        try:
            self._engine.llm.reset_prefix_cache(interrupts, reset_connector=reaches_us)
        except RuntimeError as error:  # vLLM interrupts no request that is waiting for its load
            if "waiting for remote KV transfer" not in str(error):
                raise
            self.counts["resets refused"] += 1
        else:
            self.counts["resets"] += 1

    def _damage(self) -> None:
        """Overwrite a part of the SSD tier, whose blocks then fail to load."""
        with (self._ssd / DATA_FILE).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size > HEADER_BYTES + _DAMAGED_BYTES:
                file.seek(self._random.randrange(HEADER_BYTES, size - _DAMAGED_BYTES))
                file.write(os.urandom(_DAMAGED_BYTES))
                self.counts["damaged"] += 1
