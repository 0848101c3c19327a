"""A real vLLM engine in its own process that executes commands and can be killed.

Run as ``python driven_engine.py EXTRA_CONFIG MODEL``: scheduler and worker are in the one process,
so its driver decides when the engine steps. It reads a JSON object per line from standard input,
answers each with a line on standard output, and shuts down in order when the input ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import ENGINE_ENV, Engine, engine_arguments
from paths import ROOT, SUPPORT

_PROBE_DIR = "KV_PROBE_DIR"
_MARK = "ANSWER "  # vLLM writes to standard output too


class DrivenEngine:
    """Starts the process; `wait_ready` before the first call.

    Args:
        probe_dir: Where digests of the blocks go; None: nothing is digested.
        log: What the engine says is appended to it.
        model: As `make_models` has them.
    """

    def __init__(
        self, extra_config: dict[str, Any], probe_dir: Path | None, log: Path, model: str = "tiny"
    ) -> None:
        self._log = log
        self._runtime_dir = tempfile.TemporaryDirectory(prefix="fc-")  # socket paths must be short
        path = [str(SUPPORT), str(ROOT)]
        probes = {} if probe_dir is None else {_PROBE_DIR: str(probe_dir)}
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(extra_config), model],
                env={
                    **os.environ,
                    **ENGINE_ENV,
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "PYTHONPATH": os.pathsep.join(path),
                    **probes,
                    "XDG_RUNTIME_DIR": self._runtime_dir.name,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        self._answer()

    def generate(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return eight tokens, and how many of the prompt came from a cache."""
        seen = self._ask(do="generate", prompt=prompt)
        return seen["tokens"], seen["cached"]

    def serve(self, prompts: list[list[int]]) -> float:
        """Serve the prompts, as many at once as the engine takes; return the seconds it took."""
        return float(self._ask(do="serve", prompts=prompts))

    def settle(self) -> None:
        """Wait until what was stored is in every tier."""
        self._ask(do="settle")

    def stats(self) -> dict[str, Any]:
        """`KVManager.stats`."""
        return dict(self._ask(do="stats"))

    def kill(self) -> None:
        """Kill the engine and its workers at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Stop in an orderly way, or kill what does not end. A killed engine may be stopped."""
        try:
            self._process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._runtime_dir.cleanup()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise AssertionError(f"the engine has ended:\n{self._log.read_text()[-4000:]}")


@contextmanager
def driven_engines(
    *configs: dict[str, Any], probe_dir: Path | None, log: Path, model: str = "tiny"
) -> Iterator[list[DrivenEngine]]:
    """Run engines that are ready inside the block and gone after it."""
    engines = [DrivenEngine(config, probe_dir, log, model) for config in configs]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def main(extra_config: dict[str, Any], model: str) -> None:
    from vllm import LLM

    probe_dir = os.environ.get(_PROBE_DIR)
    llm = LLM(**engine_arguments(model, extra_config, probing=probe_dir is not None))
    engine = Engine(llm, Path(probe_dir or os.devnull))

    def answer(value: Any) -> None:
        print(_MARK + json.dumps(value), flush=True)

    answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "generate":
                output = engine.generate(request["prompt"])
                tokens = list(output.outputs[0].token_ids)
                answer({"tokens": tokens, "cached": output.num_cached_tokens})
            case "serve":
                started = time.monotonic()
                engine.generate_all(request["prompts"])
                answer(time.monotonic() - started)
            case "settle":
                engine.settle()
                answer("settled")
            case "stats":
                answer(engine.manager.stats())
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
