"""One run of each tool against a server: what is asked, and the samples that are kept of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from arms import ARMS, BIG_GPU, BLOCK, SERVED, DidNotRun, Server, Sizes
from msgspec.structs import replace
from simulator import write_prompts
from traffic import scaled, working_set
from venvs import peer_python

from flexcache.bench.suite import Unsupported
from flexcache.replay.traces import MooncakeRequest

HERE = Path(__file__).parent
ANSWER = 8


@dataclass(frozen=True)
class Task:
    """A tool and its traffic.

    Attributes:
        loads: At which it is run; ``unit`` says of what they are numbers.
        ask: Runs it once against a server, and returns what is kept: milliseconds to the first
            token of each request, or whatever else the tool finds.
        working_set: Tokens of all prompts, each shared one once; 0 if not known beforehand.
    """

    name: str
    unit: str
    loads: Sequence[float]
    ask: Callable[[Server, float, Path], dict[str, Any]]
    working_set: int = 0
    sizes: Sizes = Sizes()  # noqa: RUF009
    arms: Sequence[str] = ARMS
    restarts: bool = True


def call_tool(
    command: Sequence[object], limit_s: float, work_dir: Path, may_fail: bool = False,
    **extra: str,
) -> None:  # fmt: skip
    """Run a tool without our packages on its path, with ``extra`` variables.

    Raises:
        DidNotRun: It fails or takes too long.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment |= extra
    log = work_dir / "tool.log"
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [*map(str, command)], env=environment, cwd=work_dir, stdout=output,
                stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise DidNotRun(f"{command[0]} took more than {limit_s:g} s") from None
    if done.returncode and not may_fail:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise DidNotRun(f"exit status {done.returncode}: {(lines or ['no output'])[-1][:400]}")


def prefix_repetition(limit_s: float, seed: int) -> Task:
    """vLLM's own benchmark: each of 20 prefixes four times, in random order, at a rate."""
    prefixes, times, length, suffix = 20, 4, 1024, 64

    def ask(server: Server, rate: float, work_dir: Path) -> dict[str, Any]:
        options = [
            "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", length,
            "--prefix-repetition-suffix-len", suffix, "--prefix-repetition-output-len", ANSWER,
            "--prefix-repetition-num-prefixes", prefixes, "--num-prompts", times * prefixes,
            "--request-rate", rate,
        ]  # fmt: skip
        return _vllm_bench(server, options, limit_s, seed, work_dir)

    tokens = prefixes * (length + times * suffix)
    return Task("prefix-repetition", "requests/s", (1.6,), ask, tokens)


def timed_trace(limit_s: float, seed: int, trace: Path) -> Task:
    """vLLM's own benchmark: conversations of a production trace, scaled."""
    lines = _conversations(trace, seed)

    def ask(server: Server, rate: float, work_dir: Path) -> dict[str, Any]:
        prompts = work_dir / "trace.jsonl"
        write_prompts(prompts, lines)
        options = [
            "--dataset-name", "timed_trace", "--dataset-path", prompts, "--num-prompts", len(lines),
            "--timed-trace-chunk-hash-size", lines[0].tokens_per_id,
            "--timed-trace-sec-multiplier", 0.001 / rate,
            "--timed-trace-label-timestamp", "timestamp",
            "--timed-trace-label-input-length", "input_length",
            "--timed-trace-label-output-length", "output_length",
            "--timed-trace-label-hash-ids", "hash_ids",
        ]  # fmt: skip
        return _vllm_bench(server, options, limit_s, seed, work_dir)

    return Task("timed-trace", "requests/s", (2.4, 3.2), ask, working_set(lines))


def _conversations(trace: Path, seed: int) -> list[MooncakeRequest]:
    """Return the requests of both tools that replay a trace, one a second."""
    return scaled(trace, 2560, 120, 1.0, ANSWER, seed)


def _vllm_bench(
    server: Server, options: Sequence[object], limit_s: float, seed: int, work_dir: Path
) -> dict[str, Any]:
    command = [
        sys.executable, HERE / "vllm_bench.py", "--backend", "vllm", "--base-url", server.url,
        "--model", SERVED, "--tokenizer", server.model, "--seed", seed, "--temperature", 0,
        "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", work_dir, "--result-filename", "result.json", *options,
    ]  # fmt: skip
    call_tool(command, limit_s, work_dir)
    found = json.loads((work_dir / "result.json").read_text())
    answered = [ttft for ttft, error in zip(found["ttfts"], found["errors"], strict=True)
                if not error]  # fmt: skip
    return {
        "ttft_ms": [round(ttft * 1e3, 1) for ttft in answered],
        "failed": len(found["ttfts"]) - len(answered),
        "duration_s": round(found["duration"], 2),
    }


def aiperf_agents(limit_s: float, seed: int, venvs: Path, work_dir: Path) -> Task:
    """AIPerf's agentic sessions: shared instructions, tool outputs, pauses, resets."""
    python = peer_python(venvs, "aiperf")
    config = HERE / "agents.json"
    command = [python, "-m", "aiperf", "synthesize", "agentic-code", "--num-sessions", 40,
               "--config", config, "--seed", seed, "--output", work_dir]  # fmt: skip
    call_tool(command, limit_s, work_dir)
    (dataset,) = work_dir.glob("*/dataset.jsonl")

    def ask(server: Server, users: float, work_dir: Path) -> dict[str, Any]:
        options = ["--input-file", dataset, "--concurrency", f"{users:g}",
                   "--dataset-sampling-strategy", "sequential",
                   "--benchmark-duration", 100, "--benchmark-grace-period", 30]  # fmt: skip
        return _aiperf(python, server, options, limit_s, seed, work_dir)

    return Task("aiperf-agents", "users", (8,), ask)  # how many sessions are asked, time decides


def aiperf_mooncake(limit_s: float, seed: int, trace: Path, venvs: Path) -> Task:
    """AIPerf's replay of conversations of a Mooncake trace, scaled, at their times."""
    python = peer_python(venvs, "aiperf")
    lines = _conversations(trace, seed)

    def ask(server: Server, rate: float, work_dir: Path) -> dict[str, Any]:
        prompts = work_dir / "trace.jsonl"
        at_rate = [replace(line, timestamp=line.timestamp / rate) for line in lines]
        write_prompts(prompts, at_rate)
        options = ["--input-file", prompts, "--fixed-schedule"]
        return _aiperf(python, server, options, limit_s, seed, work_dir)

    return Task("aiperf-mooncake", "requests/s", (3.2,), ask, working_set(lines))


def _aiperf(
    python: str, server: Server, options: Sequence[object], limit_s: float, seed: int,
    work_dir: Path,
) -> dict[str, Any]:  # fmt: skip
    found = work_dir / "aiperf"
    command = [
        python, "-m", "aiperf", "profile", "--model", SERVED, "--tokenizer", SERVED,
        "--url", server.url, "--endpoint-type", "chat", "--streaming",
        "--custom-dataset-type", "mooncake_trace", "--isl-block-size", BLOCK,
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--random-seed", seed, "--artifact-dir", found, "--export-level", "records",
        "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", "--use-server-token-count",
        *options,
    ]  # fmt: skip
    call_tool(command, limit_s, work_dir, HF_HUB_CACHE=str(_as_cached(server.model, work_dir)))
    (records,) = found.rglob("profile_export.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    asked = [line for line in lines if line["metadata"].get("benchmark_phase") != "warmup"]
    answered = [line for line in asked if not line.get("error")]
    if not answered:
        raise DidNotRun("no request was answered")
    starts = [line["metadata"]["request_start_ns"] for line in answered]
    ends = [line["metadata"]["request_end_ns"] for line in answered]
    return {
        "ttft_ms": [round(line["metrics"]["time_to_first_token"]["value"], 1) for line in answered],
        "failed": len(asked) - len(answered),
        "duration_s": round((max(ends) - min(starts)) / 1e9, 2),
    }


def _as_cached(model: Path, work_dir: Path) -> Path:
    """Return a directory in which the hub's client finds the model under the name `SERVED`.

    AIPerf 0.13 takes a directory for a name of the hub where it loads a tokenizer offline
    (github.com/ai-dynamo/aiperf/pull/1339).
    """
    hub, revision = work_dir / "hub", "0" * 40
    place = hub / f"models--{SERVED}"
    if not place.exists():
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(revision)
        (place / "snapshots").mkdir()
        (place / "snapshots" / revision).symlink_to(model)
    return hub


def cache_pressure(limit_s: float, seed: int, venvs: Path) -> Task:
    """What cache-pressure finds: tokens retained; needles, answered twice; aborts; subagents."""
    python, newer = cache_pressure_python(venvs)
    sizes = Sizes(ssd=40_960)

    def tool(
        server: Server, module: str, output: Path, seconds: float, *options: object
    ) -> dict[str, Any]:
        command = [python, "-m", f"cache_pressure.{module}", "--base-url", f"{server.url}/v1",
                   "--model", SERVED, "--output", output, *options]  # fmt: skip
        output.unlink(missing_ok=True)
        call_tool(command, seconds, output.parent, may_fail=True)
        with suppress(FileNotFoundError):
            return dict(json.loads(output.read_text()))
        raise DidNotRun(f"{module}: {(output.parent / 'tool.log').read_text()[-300:]}")

    def ask(server: Server, _: float, work_dir: Path) -> dict[str, Any]:
        run, part = partial(tool, server), limit_s / 4
        needles = ("--lengths", "500,1000,2000", "--salt", seed, "--max-tokens", 24)
        first = run("needle", work_dir / "needle.json", part, *needles)
        retained = run(
            "core", work_dir / "pressure.json", 2 * part, "--kv-size", server.capacity,
            "--context-tokens", 1580,  # ten fill DRAM by 97 %
        )  # fmt: skip
        again = run("needle", work_dir / "needle.json", part, *needles)
        answers = [[each["response"] for each in found["results"]] for found in (first, again)]
        found = {
            "retained_tokens": retained["retained_tokens"],
            "capacity": retained["capacity_tokens"],
            "cold_ms": round(1e3 * (retained["cold_ttft"] or 0), 1),
            "hit_ms": round(1e3 * (retained["hit_ttft"] or 0), 1),
            "verify_ms": [round(1e3 * each["ttft"], 1) for each in retained["verify"]],
            "needle_answers": answers[0], "needle_answers_again": answers[1],
        }  # fmt: skip
        if not newer:
            return {**found, "skipped": "abort-sim, agent-sim: no Python 3.12 was found"}
        aborts = run(
            "abort_sim", work_dir / "abort.json", part, "--context-tokens", 2000, "--runs", 3,
            "--thinking-tokens", 32, "--max-tokens", 256, "--salt", seed,
            "--max-context", sizes.longest,
        )  # fmt: skip
        agents = run(
            "agent_sim", work_dir / "agents.json", part, "--sessions", 2, "--main-tokens", 1500,
            "--sub-tokens", 1000, "--step-tokens", 300, "--finalize-tokens", 200,
            "--max-tokens", 16, "--salt", seed, "--max-context", sizes.longest, "--no-viz",
        )  # fmt: skip
        return {
            **found,
            "abort_reuse": [each["reuse"] for each in aborts["records"]],
            "abort_ok": aborts["summary"]["ok"],
            "agent_finals_kept": agents["summary"]["finalize_ok"],
            "agent_finals": agents["summary"]["finalize_total"],
            "agent_main_kept": agents["summary"]["main_reused"],
            "agent_main": agents["summary"]["main_total"],
        }

    arms = (BIG_GPU, *ARMS)
    return Task("cache-pressure", "", (0,), ask, 0, sizes, arms, restarts=False)


def cache_pressure_python(venvs: Path) -> tuple[str, bool]:
    """Return the environment's interpreter, and whether it is new enough for all of the tests."""
    pyenv = Path.home() / ".pyenv" / "versions"
    for made_with in (
        sys.executable, *(f"python3.{minor}" for minor in (12, 13, 14)),
        *map(str, sorted(pyenv.glob("3.1[2-9]*/bin/python3"))),
    ):  # fmt: skip
        code = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
        with suppress(OSError):
            if not subprocess.run([made_with, "-c", code], capture_output=True).returncode:
                return peer_python(venvs, "cache-pressure", made_with), True
    return peer_python(venvs, "cache-pressure"), False


def task_of(
    name: str, limit_s: float, seed: int, trace: Path | None, venvs: Path, work_dir: Path
) -> Task:
    """Make a task by its name; some need a trace.

    Args:
        work_dir: Of what a tool makes beforehand, until the task's last run.

    Raises:
        Unsupported: A tool does not install, or there is no trace.
    """
    makers: Mapping[str, Callable[[], Task]] = {
        "prefix-repetition": lambda: prefix_repetition(limit_s, seed),
        "cache-pressure": lambda: cache_pressure(limit_s, seed, venvs),
        "aiperf-agents": lambda: aiperf_agents(limit_s, seed, venvs, work_dir),
    }
    if name in makers:
        return makers[name]()
    if trace is None:
        raise Unsupported("it needs --trace, a conversation trace in Mooncake's format")
    if name == "timed-trace":
        return timed_trace(limit_s, seed, trace)
    return aiperf_mooncake(limit_s, seed, trace, venvs)
