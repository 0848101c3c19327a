"""An engine of two ranks, each in a process of its own, that are stopped in steps that load a
prompt. Prints, as JSON, how each case went.

    python stopped_steps.py [ARGUMENT=JSON of vllm.LLM ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cluster import until
from engines import ENGINE_ENV, engine_arguments, make_prompt
from paths import MODELS
from probe_connector import compare_probes

SERVER_TIMEOUT_S = 1.0
STOPPED_S = 3 * SERVER_TIMEOUT_S
PROCESSES = ("scheduler", "rank 0", "rank 1")


def resume_later(path: Path) -> None:
    """Let the process that stops go on, after all others have taken it for dead."""
    until(path.exists)
    time.sleep(STOPPED_S)
    os.kill(int(path.read_text()), signal.SIGCONT)
    path.unlink()


def tokens_of(llm: Any, prompt: list[int]) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def forget_gpu(llm: Any, seed: int) -> None:
    """Overwrite vLLM's blocks with those of other prompts, and have it forget all."""
    for number in range(5):
        tokens_of(llm, make_prompt(1900, seed + number))
    until(llm.reset_prefix_cache)


def main() -> None:
    from stopping_connector import ASKED, STOPPED

    os.environ.update(ENGINE_ENV, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    from make_models import make_model
    from vllm import LLM

    make_model(MODELS, "tiny")
    with tempfile.TemporaryDirectory(prefix="fc-") as name:
        directory = Path(name)
        os.environ["KV_PROBE_DIR"] = name
        extra = {
            "layerwise_load": "on", "cpu_cache_gb": 0.1, "server_timeout_s": SERVER_TIMEOUT_S,
        }  # fmt: skip
        connector = {
            "kv_connector": "StoppingConnector", "kv_connector_module_path": "stopping_connector",
        }  # fmt: skip
        arguments = engine_arguments("tiny", extra, connector=connector, dtype="float32")
        overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
        arguments.update({key: json.loads(text) for key, text in overrides.items()})
        llm = LLM(**arguments, tensor_parallel_size=2)
        seen = []
        try:
            for number, process in enumerate(PROCESSES):
                prompt = make_prompt(900, 1)
                cold = tokens_of(llm, prompt)
                forget_gpu(llm, 100 + 10 * number)
                (directory / ASKED).write_text(process)
                waker = threading.Thread(target=resume_later, args=(directory / STOPPED,))
                waker.start()
                struck = tokens_of(llm, prompt)
                waker.join()
                later = tokens_of(llm, prompt)
                seen.append(
                    {"stopped": process, "equal": struck == cold, "later equal": later == cold}
                )
                forget_gpu(llm, 500 + 10 * number)
        finally:
            llm.llm_engine.engine_core.shutdown()
        probes = compare_probes(directory)
    print(json.dumps({"seen": seen, "probes": probes}))


if __name__ == "__main__":
    main()
