"""Benchmarks of others: traffic, what was run already, and the tables."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rounds
from arms import ARMS, DRAM, LMCACHE, NONE, PEER, SOURCES, SSD, DidNotRun, Sizes
from paths import ROOT
from rounds import RawFigures, run_all, units
from simulator import _tokens, write_prompts
from tools import Task
from traffic import scaled, working_set

from flexcache.replay.traces import MooncakeRequest, read_requests

CHARTS = ROOT / "scripts" / "render_charts.py"


def trace(path: Path) -> Path:
    """Three conversations of two turns, one of a single one, one with a prompt that is too long."""
    lines = []
    for number in range(3):
        first, second = [0, 10 * number + 1], [0, 10 * number + 1, 10 * number + 2]
        lines.append((number, 1024, first))
        lines.append((number + 10, 1536, second))
    lines += [(5, 512, [99]), (6, 1024, [200, 201]), (7, 99_999, [200, 201, *range(300, 494)])]
    lines.sort(key=lambda line: line[0])
    write_prompts(path, [MooncakeRequest(1000.0 * at, ids, tokens) for at, tokens, ids in lines])
    return path


def test_whole_conversations_are_scaled_and_come_at_a_rate(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.jsonl")
    lines = scaled(path, 200, 6, rate=2.0, answer=8, seed=1)
    assert [line.timestamp for line in lines] == [0, 500, 1000, 1500, 2000, 2500]
    assert sorted(line.input_length for line in lines) == [64, 64, 64, 96, 96, 96]
    assert {(line.block_size, line.output_length) for line in lines} == {(32, 8)}
    assert all(len(line.hash_ids) * 32 == line.input_length for line in lines)
    assert working_set(lines) == 32 * (1 + 3 * 2)
    assert scaled(path, 200, 6, rate=2.0, answer=8, seed=1) == lines
    again = tmp_path / "again.jsonl"
    write_prompts(again, lines)
    assert list(read_requests(again)) == lines  # what other tools are given


def test_hit_tokens_are_those_of_the_last_half_and_of_part_blocks() -> None:
    lines = [MooncakeRequest(0, [1, 2], 600), MooncakeRequest(1, [1, 2], 600),
             MooncakeRequest(2, [1, 3], 1024)]  # fmt: skip
    assert _tokens(lines, [9, 2, 1]) == 600 + 512


def test_each_round_begins_with_another_arm_and_has_all() -> None:
    task = Task("t", "users", (1, 2), lambda server, load, directory: {})
    planned = list(units(task, ARMS, 3))
    assert len(set(planned)) == len(planned) == 3 * 2 * len(ARMS)
    assert [next(u[2] for u in planned if u[0] == number) for number in range(3)] == [*ARMS[:3]]
    assert [u[0] for u in planned] == sorted(u[0] for u in planned)


def run_of(number: int, arm: str, **more: Any) -> dict[str, Any]:
    return {"benchmark": "prefix-repetition", "round": number, "load": 0.8, "unit": "requests/s",
            "arm": arm, "seed": 1, "phase": "start", **more}  # fmt: skip


def test_what_failed_or_was_torn_is_run_again(tmp_path: Path) -> None:
    raw = RawFigures(tmp_path / "external-x.jsonl")
    assert raw.done(1) == set()
    raw.add([run_of(0, "a"), run_of(0, "a", phase="restart")])
    raw.add([run_of(0, "b", error="no")])
    with raw.path.open("a") as file:
        file.write('{"round": 0, "lo')  # killed as it wrote
    assert raw.done(1) == {(0, 0.8, "a")}
    raw.add([run_of(1, "a")])
    assert raw.done(1) == {(0, 0.8, "a"), (1, 0.8, "a")}
    assert raw.done(2) == set()


def test_runs_are_kept_and_only_what_failed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, bool]] = []
    lost = {LMCACHE}

    class Fake:
        def tokens_by_source(self) -> dict[str, float]:
            return dict.fromkeys(SOURCES, float(len(served)))

    @contextmanager
    def fake_serving(
        arm: str, model: Path, sizes: Sizes, directory: Path, venvs: Path, log: Path
    ) -> Iterator[Fake]:
        if arm in lost:
            raise DidNotRun("no such package")
        served.append((arm, directory.exists()))
        directory.mkdir(exist_ok=True)
        yield Fake()
        served.append((arm, False))

    monkeypatch.setattr(rounds, "serving", fake_serving)
    task = Task("t", "users", (2,), lambda server, load, directory: {"ttft_ms": [load]}, 9)
    raw = RawFigures(tmp_path / "external-t.jsonl")

    def run() -> int:
        return run_all(task, raw, ARMS, 1, 1, 10, tmp_path, tmp_path, tmp_path)

    assert run() == 1
    starts = served[::2]
    assert starts == [(NONE, False), (PEER, False), (DRAM, False), (SSD, False), (SSD, True)]
    lost.clear()
    assert run() == 0 and served[-2][0] == LMCACHE and len(served) == 12
    assert run() == 0 and len(served) == 12
    lines = [json.loads(line) for line in raw.path.read_text().splitlines()]
    assert [(line["arm"], line.get("phase")) for line in lines] == [
        (NONE, "start"), (PEER, "start"), (LMCACHE, None), (DRAM, "start"), (SSD, "start"),
        (SSD, "restart"), (LMCACHE, "start"),
    ]  # fmt: skip
    assert lines[2]["error"] == "no such package"
    assert lines[0]["ttft_ms"] == [2] and lines[0]["working_set_tokens"] == 9
    assert not list(tmp_path.glob("flexcache-external-*"))


def test_tables_have_medians_and_extremes_of_the_rounds(tmp_path: Path) -> None:
    charts = runpy.run_path(str(CHARTS), run_name="charts")
    raw, sizes = RawFigures(tmp_path / "external-prefix-repetition.jsonl"), vars(Sizes())
    for number, slow in enumerate((0, 100, 3000)):
        tokens = {"GPU": 10, "cache": 60, "computed": 30, "DRAM": 40, "SSD": 20}
        found = {"ttft_ms": [100 + slow] * 9 + [900 + slow], "failed": 0, "duration_s": 5.0,
                 "tokens": tokens, "sizes": sizes, "working_set_tokens": 2 * 4352}  # fmt: skip
        raw.add([run_of(number, ARMS[-1], **found)])
        raw.add([run_of(number, ARMS[0], error="no engine")])
    (cell,) = charts["external_cells"](tmp_path)
    assert cell.p50_ms == (200, 100, 3100) and cell.p90_ms == (1000, 900, 3900)
    assert cell.in_time_per_s == (2.0, 0.0, 2.0)
    assert cell.shares == {"GPU": 0.1, "DRAM": 0.4, "SSD": 0.2, "cache": 0.0}
    (tmp_path / "external-simulator.json").write_text(json.dumps([
        {"trace": "t", "blocks": 1000, "policy": "lru", "simulator_hit_tokens": 5,
         "hit_tokens": 5, "of_tokens": 10},
    ]))  # fmt: skip
    answers = {"needle_answers": ["x", "y"], "needle_answers_again": ["x", "z"],
               "retained_tokens": 50, "capacity": 100}  # fmt: skip
    pressure = RawFigures(tmp_path / "external-cache-pressure.jsonl")
    for arm in ("no cache, large GPU", ARMS[-1]):
        pressure.add([run_of(0, arm, **answers)])
    text = "\n".join(charts["external_tables"](tmp_path))
    assert "| 200 (100 to 3,100) | 1,000 (900 to 3,900) | 2.00 (0.00 to 2.00) |" in text
    assert "| 2.0 / 0.5 / 0.0 |" in text
    assert "| 50 | 50% | 2 / 1 of 2 | - | - |" in text
    assert "| t | 1,000 | lru | 5 | 5 | 50.00% |" in text
    page = charts["write_page"](f"a\n{charts['BEGIN']}old\n{charts['END']}\nz\n", [cell])
    assert page.startswith("a\n") and page.endswith("\nz\n") and "old" not in page
    assert f"| {ARMS[-1]} | 200 / 1,000 (30%) |" in page
    assert charts["write_page"](page, [cell]) == page
    charts["draw_external"]([cell], tmp_path / "external.png")
    assert (tmp_path / "external.png").stat().st_size > 1000
