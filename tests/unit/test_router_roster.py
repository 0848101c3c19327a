"""Which workers take requests: probes, failing requests, draining, lists."""

from __future__ import annotations

import random

import pytest

from flexcache.router.chooser import Outcome
from flexcache.router.fleet import ModelCard, WorkerSpec, WorkerState
from flexcache.router.prober import Capacity, parse_capacities
from flexcache.router.roster import KnownEngine, Probe, Roster
from flexcache.router.router import KVRouter

A, B = "http://a:1", "http://b:1"


def spec(url: str, rank: int | None = None) -> WorkerSpec:
    name = url if rank is None else f"{url}#{rank}"
    return WorkerSpec(name=name, url=url, data_parallel_rank=rank)


def cards(*names: str) -> list[ModelCard]:
    return [ModelCard(name) for name in names]


class Book(KVRouter):
    @property
    def states(self) -> dict[str, WorkerState]:
        return {member.spec.name: member.state for member in self.fleet}

    @property
    def models(self) -> dict[str, set[str]]:
        return {member.spec.name: set(member.models) for member in self.fleet}

    @property
    def up(self) -> set[str]:
        return {name for name, state in self.states.items() if state is WorkerState.UP}


@pytest.fixture
def book() -> Book:
    return Book()


def two(book: Book) -> Roster:
    roster = Roster(book)
    roster.set_listed([spec(A), spec(B)])
    for url in (A, B):
        roster.probed(url, Probe.GOOD, 0.0)
    return roster


def test_an_engine_takes_requests_once_a_probe_found_it(book: Book) -> None:
    roster = Roster(book)
    roster.set_listed([spec(A), spec(B)])
    assert book.up == set() and not roster.is_known
    roster.probed(A, Probe.GOOD, 0.0)
    roster.probed(B, Probe.BAD, 0.0)
    assert book.up == {A} and roster.is_known
    roster.probed("http://gone:1", Probe.GOOD, 0.0)
    roster.check()


def test_only_engines_that_take_requests_say_what_their_models_are(book: Book) -> None:
    roster = two(book)
    roster.set_cards(A, [ModelCard("m", raw=b"of a")])
    roster.set_cards(B, [ModelCard("m", raw=b"of b"), ModelCard("only b", raw=b"")])
    assert roster.cards() == {"m": b"of b", "only b": b""}
    roster.probed(B, Probe.BAD, 1.0)
    assert roster.cards() == {"m": b"of a"}


def test_an_engine_that_refuses_is_out_at_once_and_one_that_is_late_after_three_probes() -> None:
    engine = KnownEngine()
    engine.probed(Probe.GOOD, 0.0)
    for _ in range(2):
        engine.probed(Probe.LATE, 0.0)
    assert engine.is_up
    engine.probed(Probe.GOOD, 0.0)
    for _ in range(2):
        engine.probed(Probe.LATE, 0.0)
    assert engine.is_up
    engine.probed(Probe.LATE, 0.0)
    assert not engine.is_up
    engine.probed(Probe.GOOD, 0.0)
    engine.probed(Probe.BAD, 0.0)
    assert not engine.is_up
    engine.check()


def test_failing_requests_take_an_engine_out_until_probes_succeed(book: Book) -> None:
    roster = two(book)
    doubts: list[str] = []
    roster._on_doubt = doubts.append
    for _ in range(4):
        roster.ended(A, Outcome.BROKEN, 1.0)
    assert book.up == {B} and doubts == [A] * 4
    for _ in range(3):
        roster.probed(A, Probe.GOOD, 1.1)  # before the back-off ends, probes are no trials
    assert book.up == {B}
    for _ in range(3):
        roster.probed(A, Probe.GOOD, 2.0)
    assert book.up == {A, B}


def test_circuits_never_take_all_engines_out(book: Book) -> None:
    roster = two(book)
    for _ in range(4):
        roster.ended(A, Outcome.REFUSED, 1.0)
        roster.ended(B, Outcome.REFUSED, 1.0)
    assert book.up == {A, B}
    roster.probed(A, Probe.BAD, 1.0)
    assert book.up == {B}


def test_circuits_never_take_all_engines_of_a_model_out(book: Book) -> None:
    roster = two(book)
    roster.set_cards(A, cards("small"))
    roster.set_cards(B, cards("large"))
    for _ in range(4):
        roster.ended(A, Outcome.BROKEN, 1.0)
    assert book.up == {A, B}
    roster.set_cards(B, cards("large", "small"))
    assert book.up == {B}
    roster.drain([B])
    assert book.up == {A}
    roster.probed(A, Probe.BAD, 1.0)
    assert book.up == set()


def test_workers_of_a_known_engine_serve_its_models(book: Book) -> None:
    roster = Roster(book)
    roster.set_listed([spec(A)])
    roster.set_cards(A, [ModelCard("small"), ModelCard("lora", parent="small")])
    roster.set_cards("http://gone:1", cards("large"))
    roster.set_listed([spec(A, 0), spec(A, 1), spec(B)])
    both = {"small", "lora"}
    assert book.models == {f"{A}#0": both, f"{A}#1": both, B: set()}
    assert book.fleet[f"{A}#1"].adapters == {"lora"} and not book.fleet[B].adapters


def test_clients_that_leave_say_nothing_of_an_engine(book: Book) -> None:
    roster = two(book)
    for _ in range(50):
        roster.ended(A, Outcome.ABORTED, 1.0)
    assert book.up == {A, B}


def test_a_draining_worker_is_known_and_takes_no_requests(book: Book) -> None:
    roster = two(book)
    roster.drain([A])
    assert book.up == {B} and book.states[A] is WorkerState.DRAINING
    roster.probed(A, Probe.BAD, 1.0)
    assert book.states[A] is WorkerState.DOWN
    roster.probed(A, Probe.GOOD, 1.0)
    assert book.states[A] is WorkerState.DRAINING
    roster.drain([A], False)
    assert book.up == {A, B}


def test_ranks_share_the_health_of_their_engine(book: Book) -> None:
    roster = Roster(book)
    roster.set_listed([spec(A, 0), spec(A, 1)])
    roster.probed(A, Probe.GOOD, 0.0)
    assert book.up == {f"{A}#0", f"{A}#1"}
    assert roster.named(A) == [f"{A}#0", f"{A}#1"]
    assert roster.named(f"{A}#1") == [f"{A}#1"]
    assert roster.urls == (A,)


def test_what_is_removed_by_hand_stays_away_until_it_is_added(book: Book) -> None:
    roster = two(book)
    roster.remove([A])
    roster.set_listed([spec(A), spec(B)])
    assert set(book.states) == {B}
    roster.add([spec(A)])
    assert set(book.states) == {A, B}
    roster.set_listed([])
    assert set(book.states) == {A}
    roster.remove([A])
    assert set(book.states) == set()
    roster.set_listed([spec(A)])
    assert set(book.states) == {A}
    roster.check()


def test_changes_of_states_and_of_workers_are_reported(book: Book) -> None:
    states: list[int] = []
    changes: list[int] = []
    roster = Roster(
        book, on_state=lambda: states.append(1), on_change=lambda specs: changes.append(len(specs))
    )
    roster.set_listed([spec(A)])
    roster.set_listed([spec(A)])
    roster.probed(A, Probe.GOOD, 0.0)
    roster.probed(A, Probe.GOOD, 0.0)
    assert (len(states), changes) == (1, [1])


def test_tables_agree_after_any_sequence(book: Book) -> None:
    rng = random.Random(7)
    roster = Roster(book)
    specs = [spec(A), spec(B), spec("http://c:1", 0), spec("http://c:1", 1)]
    for step in range(3000):
        some = rng.sample(specs, rng.randrange(len(specs) + 1))
        names = [each.name for each in some]
        match rng.randrange(7):
            case 0:
                roster.set_listed(some)
            case 1:
                roster.add(some)
            case 2:
                roster.remove(names)
            case 3:
                roster.drain([name for name in names if name in roster], rng.random() < 0.5)
            case 4:
                roster.probed(rng.choice(specs).url, rng.choice(list(Probe)), step / 10)
            case 6:
                roster.set_cards(rng.choice(specs).url, cards(*rng.sample("xyz", rng.randrange(3))))
            case 5:
                roster.ended(rng.choice(specs).name, rng.choice(list(Outcome)), step / 10)
        roster.check()
        assert set(book.states) == {each.name for each in roster.specs}
        assert {each.name for each in roster.up} == book.up


def test_capacities_are_read_from_vllms_metrics() -> None:
    text = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="27648"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="27000"} 1.0
vllm:num_requests_running{engine="0"} 3.0
"""
    assert list(parse_capacities(text)) == [Capacity(0, 27648, 16), Capacity(1, 27000, 16)]
    none = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert list(parse_capacities(none)) == []
    older = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="5"} 1.0\n'
    assert list(parse_capacities(older)) == [Capacity(None, 5, 32)]
    assert list(parse_capacities("")) == []
    assert list(parse_capacities(older.replace("32", "0"))) == [], "no prompt has blocks of nothing"


def test_capacities_are_read_from_sglangs_gauges() -> None:
    text = """# TYPE sglang:page_size gauge
sglang:page_size{dp_rank="0",model_name="m",tp_rank="0"} 64.0
sglang:page_size{dp_rank="1",model_name="m",tp_rank="0"} 64.0
sglang:max_total_num_tokens{dp_rank="0",model_name="m",tp_rank="0"} 640000.0
sglang:max_total_num_tokens{dp_rank="1",model_name="m",tp_rank="0"} 6400.0
sglang:max_total_num_tokens_swa{dp_rank="1",model_name="m",tp_rank="0"} 9.0
"""
    assert list(parse_capacities(text)) == [Capacity(0, 10_000, 64), Capacity(1, 100, 64)]
    alone = 'sglang:page_size{model_name="m"} 16.0\n'
    assert list(parse_capacities(alone)) == []
    alone += 'sglang:max_total_num_tokens{model_name="m"} 4096.0\n'
    assert list(parse_capacities(alone)) == [Capacity(None, 256, 16)]
