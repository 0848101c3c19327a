"""A worker of Dynamo that costs next to nothing: a token every so often, as many as requested.

python dynamo_echo.py MODEL_DIR SECONDS_PER_TOKEN        in Dynamo's environment
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

BLOCK_SIZE = 16
_FIRST_TOKEN = 20


async def main(model: str, interval_s: float) -> None:
    async def generate(request: dict[str, Any], context: Any = None) -> AsyncIterator[Any]:
        count = request["stop_conditions"]["max_tokens"]
        for number in range(count):
            if number:
                await asyncio.sleep(interval_s)
            answer: dict[str, Any] = {"token_ids": [_FIRST_TOKEN + number % 100]}
            if number == count - 1:
                answer["finish_reason"] = "length"
            yield answer

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    await register_model(
        ModelInput.Tokens, ModelType.Completions | ModelType.Chat, endpoint, model, "fake",
        worker_type=WorkerType.Aggregated, kv_cache_block_size=BLOCK_SIZE,
    )  # fmt: skip
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], float(sys.argv[2])))
