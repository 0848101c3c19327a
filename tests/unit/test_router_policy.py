"""Policies: what each prefers, ties, who may be chosen."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flexcache.errors import ConfigError
from flexcache.router.dispatcher import Dispatcher, MatchedPrompt
from flexcache.router.load import Served, Work
from flexcache.router.policy import POLICIES, make_policy
from flexcache.router.service_time import MIN_SAMPLES, ServiceTime

BLOCK = 16


def dispatcher(policy: str = "ours", num_workers: int = 4) -> Dispatcher:
    """Return one that knows: 0.02 s + 0.1 ms a token."""
    times = ServiceTime(num_workers)
    for i in range(5 * MIN_SAMPLES):
        tokens = 1 + i * 997 % 20_000
        times.learn(Served(i % num_workers, Work(tokens, tokens), 0.02 + 1e-4 * tokens))
    return Dispatcher(make_policy(policy), num_workers, service_time=times)


def prompt(
    tokens: int, *gpu: int, dram: tuple[int, ...] = (), keys: range = range(0)
) -> MatchedPrompt:
    matched = np.zeros((3, 4))
    matched[0, : len(gpu)] = gpu
    matched[1, : len(dram)] = dram
    return MatchedPrompt(tokens, matched, keys=keys, block_tokens=BLOCK)


def test_the_worker_with_the_prefix_is_chosen_while_it_is_free() -> None:
    router = dispatcher()
    pick, running = router.choose("a", prompt(10_000, 0, 8_000), 0.0)
    assert (pick.worker, pick.reason) == (1, "cost")
    assert running.work.new_tokens == 2_000
    assert running.work.service_s == pytest.approx(0.22, rel=0.2)
    router.check()


def test_a_prefix_is_left_when_its_worker_is_busier_than_it_saves() -> None:
    router = dispatcher()
    for i in range(20):
        router.choose(f"busy {i}", prompt(20_000, 0, 20_000 - 1_500), 0.0, np.arange(4) == 1)
    pick, _ = router.choose("a", prompt(10_000, 0, 8_000), 0.0)
    assert pick.worker != 1
    for i in range(20):
        router.first_token(f"busy {i}", 1.0)
    costs = router.score(prompt(20_000, 0, 19_000), 3.0).costs
    assert costs.argmin() == 1, "its prompts are done: it only decodes"


def test_tokens_in_dram_are_worth_less_than_on_gpu_and_more_than_none() -> None:
    router = dispatcher()
    costs = router.score(prompt(10_000, 0, 8_000, dram=(8_000,)), 0.0).costs
    assert costs[1] < costs[0] < costs[2]


def test_before_it_knows_seconds_tokens_times_requests_decide() -> None:
    router = Dispatcher(make_policy("ours"), 4)
    router.choose("a", prompt(100), 0.0, np.arange(4) == 0)
    costs = router.score(prompt(1000, 500, 400, 300, 600), 0.0).costs
    assert costs[1:].tolist() == [600, 700, 400]
    assert costs[0] > 600 * 2 - 1


@pytest.mark.parametrize("policy", POLICIES)
def test_only_eligible_workers_are_chosen(policy: str) -> None:
    router = dispatcher(policy)
    allowed = np.array([False, True, True, False])
    for i in range(40):
        pick, _ = router.choose(f"{i}", prompt(1000, 900, keys=range(i, i + 60)), 0.0, allowed)
        assert pick.worker in (1, 2)
        assert set(pick.next_best(4)) == {1, 2} - {pick.worker}
    router.check()


@pytest.mark.parametrize("policy", ["random", "least", "lmetric", "dynamo", "ours", "round_robin"])
def test_equals_share_the_requests(policy: str) -> None:
    router = dispatcher(policy)
    counts: Counter[int] = Counter()
    for i in range(400):
        pick, _ = router.choose(f"{i}", prompt(1000, 500, 500, 500, 500), float(i))
        counts[pick.worker] += 1
        router.first_token(f"{i}", i + 0.1)
        router.ended(f"{i}", i + 0.2)
    assert max(counts.values()) <= 1.3 * 100


@pytest.mark.parametrize("knows_seconds", [True, False])
def test_a_popular_prefix_is_copied_to_idle_workers(knows_seconds: bool) -> None:
    """Paced requests with one system prompt must not all go to its first holder."""
    router = dispatcher()
    if not knows_seconds:
        router = Dispatcher(make_policy("ours"), 4)
    counts: Counter[int] = Counter()
    for i in range(200):
        held = [4_000 if counts[worker] else 0 for worker in range(4)]
        pick, _ = router.choose(f"{i}", prompt(4_500, *held), float(i))
        counts[pick.worker] += 1
        router.load.first_token(router.running[f"{i}"], i + 0.01)
        router.ended(f"{i}", i + 0.02)
    assert max(counts.values()) <= 1.3 * 50
    router.check()


def test_under_load_a_prefix_stays_where_it_is() -> None:
    router = dispatcher()
    for i in range(80):
        router.choose(f"busy {i}", prompt(100), 0.0, np.arange(4) == i % 4)
        router.first_token(f"busy {i}", 0.1)
    picks = []
    for i in range(30):
        picks.append(router.choose(f"{i}", prompt(20_000, 0, 19_000), float(i))[0].worker)
        router.load.first_token(router.running[f"{i}"], i + 0.5)
        router.ended(f"{i}", i + 0.9)
    assert set(picks) == {1}


def test_before_times_are_known_a_conversation_stays_with_the_gpu_that_has_it() -> None:
    router = Dispatcher(make_policy("ours"), 4)
    router.choose("first turn", prompt(800), 0.0, np.arange(4) == 1)
    router.first_token("first turn", 0.5)
    router.ended("first turn", 0.6)
    shared = prompt(800, 0, 736, dram=(736, 0, 736, 736))
    assert {router.score(shared, 1.0).worker for _ in range(20)} == {1}
    in_dram_alone = prompt(800, dram=(736, 736, 0, 0))
    assert {router.score(in_dram_alone, 1.0).worker for _ in range(20)} == {0}


def test_among_equals_a_session_stays() -> None:
    router = dispatcher()
    stay = MatchedPrompt(1000, np.zeros((3, 4)), last_worker=3)
    assert {router.score(stay, 0.0).worker for _ in range(20)} == {3}


def test_sticky_stays_until_its_worker_is_a_second_behind() -> None:
    router = dispatcher("sticky")
    router.choose("a", prompt(15_000), 0.0, np.arange(4) == 1)
    assert router.score(prompt(1_000, 0, 900), 0.0).worker == 1
    router.choose("b", prompt(2_000), 0.0, np.arange(4) == 1)
    assert router.score(prompt(1_000, 0, 900), 0.0).worker != 1


def test_dynamo_counts_shared_blocks_once() -> None:
    router = dispatcher("dynamo")
    router.choose("a", prompt(160, keys=range(10)), 0.0, np.arange(4) == 0)
    router.first_token("a", 1.0)
    costs = router.score(prompt(160, keys=range(5, 15)), 1.0).costs
    assert costs.tolist() == [10 + 15, 20, 20, 20]
    router.ended("a", 2.0)
    assert router.score(prompt(160, keys=range(5, 15)), 2.0).costs.tolist() == [20] * 4


def test_the_next_best_come_in_order() -> None:
    router = dispatcher("lmetric")
    pick = router.score(prompt(1000, 100, 400, 200, 300), 0.0)
    assert (pick.worker, pick.next_best(2), pick.next_best(9)) == (1, [3, 2], [3, 2, 0])


def test_unknown_policies_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="ours, dynamo"):
        make_policy("best")
