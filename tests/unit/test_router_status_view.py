"""`flexcache status` of a router: what it reads, and how it presents it."""

from __future__ import annotations

import io

import msgspec
import pytest
from control_pages import ControlPages, serving
from ports import free_port
from rich.console import Console
from router_stats import (
    CACHE_A,
    CACHE_B,
    SHARED,
    SOURCE_B,
    A,
    B,
    make_routing,
    make_stats,
    make_worker,
)
from typer.testing import CliRunner

from flexcache.cli import app
from flexcache.router.stats import RouterStats, find_trouble, from_json
from flexcache.status.router import RouterRates, rates_between, render

replace = msgspec.structs.replace


def shown(stats: RouterStats, rates: RouterRates | None = None, width: int = 160) -> str:
    screen = io.StringIO()
    Console(width=width, file=screen).print(render(stats, rates, width))
    return screen.getvalue()


def row(text: str, start: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.startswith(start))
    return found.split()


def test_engines_publishers_and_accuracy() -> None:
    text = shown(make_stats())
    assert "router at http://0.0.0.0:8000, process 4242" in text
    assert "flexcache 1.2.3, up 1 h 2 min, policy ours" in text
    engine = ["up", "5", "2", "0.75", "70", "71.4%", "20,000", "90,000", "30,000", "1.25", "yes"]
    assert row(text, A)[1:] == engine
    assert row(text, B)[1:3] == ["draining", "1"]
    assert row(text, SHARED)[1:] == ["follows", "901", "0", "s", "4", "ms", "6", "1", "2"]
    assert row(text, SOURCE_B)[1:3] == ["not", "connected"]
    assert row(text, CACHE_A)[1:] == ["asked", "46", "50,000", "47", "97"]
    assert row(text, CACHE_B)[1] == "failing"
    assert "decisions: cost 80, tie 15, load 5" in text
    assert "prompt tokens found: 65.0%, gpu 50.0%, dram 12.0%, disk 3.0%" in text
    assert "60 of 78 predictions right, predicted 65.4%, reported 63.5%, not reported 12" in text
    assert "time to first token: mean 0.213 s, predicted 0.197 s, off by 0.025 s" in text
    assert "learned: 80.0 us/token, 20.0 ms each" in text
    assert "queue: 17 of 1,024 waiting, refused full 26" in text
    assert "done 85, aborted 33, refused 34, broken 35, retries 36" in text


def test_a_failing_engine_and_trouble_are_named() -> None:
    stats = make_stats(workers={A: make_worker(circuit="half_open")})
    assert row(shown(stats), A)[1] == "failing"
    assert "! A sentence." in shown(replace(stats, trouble=["A sentence."]))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_a_terminal(width: int) -> None:
    text = shown(make_stats(), None, width)
    assert max(map(len, text.splitlines())) <= width
    assert row(text, A)[1] == "up"


def test_a_new_router_has_a_view() -> None:
    routing = replace(
        make_routing(),
        decisions={},
        prompt_tokens=0,
        matched_tokens={},
        cached_tokens=replace(
            make_routing().cached_tokens,
            **dict.fromkeys(make_routing().cached_tokens.__struct_fields__, 0),
        ),
        service_time=replace(make_routing().service_time, is_learned=False),
    )
    text = shown(make_stats(workers={}, sources={}, routing=routing, process=None, peers={}))
    assert "decisions: none yet" in text
    assert "cached tokens" not in text
    assert "learned" not in text


def test_rates_are_increases_per_second() -> None:
    before = make_stats()
    routing = replace(
        before.routing,
        decisions={"cost": 80, "tie": 15, "load": 5, "new": 6},
        prompt_tokens=before.routing.prompt_tokens + 1000,
        matched_tokens={**before.routing.matched_tokens, "gpu": 50_400},
    )
    rates = rates_between(before, replace(before, routing=routing), 2.0)
    assert rates == RouterRates(2.0, requests=3.0, prompt_tokens=500.0, matched_tokens=200.0)
    assert "last 2.0 s: 3.0 requests/s, 40.0% of prompt tokens found" in shown(before, rates)
    assert before.process is not None
    another = replace(before, process=replace(before.process, pid=1))
    assert rates_between(before, another, 2.0) is None


def test_the_statistics_are_read_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = make_stats()
    with serving(ControlPages(stats, token="secret")) as pages:
        done = CliRunner().invoke(app, ["status", "--endpoint", pages.url])
        assert done.exit_code == 1
        assert "error" in done.stdout and "FLEXCACHE_ROUTER_CONTROL_TOKEN" in done.stdout
        monkeypatch.setenv("FLEXCACHE_ROUTER_CONTROL_TOKEN", "secret")
        done = CliRunner().invoke(app, ["status", "--endpoint", pages.url])
        assert done.exit_code == 0
        assert "router at http://0.0.0.0:8000" in done.stdout
        done = CliRunner().invoke(app, ["status", "--endpoint", pages.url, "--json"])
        expected = replace(stats, trouble=list(find_trouble(stats)))
        assert from_json(done.stdout) == expected


def test_a_page_of_another_program_is_said() -> None:
    with serving(ControlPages(make_stats())) as pages:
        done = CliRunner().invoke(app, ["status", "--endpoint", f"{pages.url}/ui"])
    assert done.exit_code == 1
    assert "neither the http_endpoint of a cache" in " ".join(done.stdout.split())


def test_no_router_is_said() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = CliRunner().invoke(app, ["status", "--endpoint", url])
    assert done.exit_code == 1
    assert "does not answer" in done.stdout
