"""ServiceTime: what it learns from measured times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flexcache.router.load import Served, Work
from flexcache.router.service_time import MIN_SAMPLES, ServiceTime

TRUE = (0.03, 9e-5, 2.2e-9, 8e-6, 5e-5)


def seconds(work: Work, factor: float = 1.0) -> float:
    a, b, att, dram, disk = TRUE
    u = work.new_tokens
    ctx = work.num_tokens - u
    return factor * (
        a + b * u + att * u * (ctx + u / 2) + dram * work.dram_tokens + disk * work.disk_tokens
    )


def some_work(rng: random.Random) -> Work:
    total = rng.randrange(100, 60_000)
    gpu, dram, disk = (int(total * rng.random() / 3) for _ in range(3))
    return Work(total, total - gpu - dram - disk, dram, disk)


def predicted(times: ServiceTime, work: Work, worker: int = 0) -> float:
    return times.predict_one(
        worker, work.num_tokens, work.new_tokens, work.dram_tokens, work.disk_tokens
    )


@pytest.mark.parametrize("prior", [0.05, 0.25, 1.0, 4.0, 50.0])
def test_it_learns_the_constants_whatever_it_started_from(prior: float) -> None:
    rng, times = random.Random(1), ServiceTime(4, prior=prior)
    for i in range(500):
        work = some_work(rng)
        noisy = seconds(work) * rng.uniform(0.8, 1.2) + rng.uniform(-0.01, 0.01)
        times.learn(Served(i % 4, work, max(noisy, 0.0)))
        times.check()
    works = [work for work in (some_work(rng) for _ in range(300)) if seconds(work) > 0.5]
    ratios = np.array([predicted(times, work) / seconds(work) for work in works])
    assert ratios.mean() == pytest.approx(1.0, abs=0.1)
    assert np.abs(ratios - 1.0).mean() < 0.15


def test_it_learns_which_worker_is_slower() -> None:
    rng, times = random.Random(2), ServiceTime(4)
    for i in range(400):
        work, worker = some_work(rng), i % 4
        times.learn(Served(worker, work, seconds(work, factor=2.0 if worker == 3 else 1.0)))
    ratio = times.factors[3] / times.factors[:3].mean()
    assert ratio == pytest.approx(2.0, rel=0.1)
    times.forget_worker(3)
    assert times.factors[3] == 1.0


def test_it_is_known_after_a_few_samples() -> None:
    times = ServiceTime(1)
    for _ in range(MIN_SAMPLES):
        assert not times.is_known
        times.learn(Served(0, Work(1000, 1000), 0.1))
    assert times.is_known


def test_nonsense_does_not_break_it() -> None:
    rng, times = random.Random(3), ServiceTime(2)
    for _ in range(500):
        work = Work(rng.choice([0, 1, 10_000_000]), 0) if rng.random() < 0.5 else some_work(rng)
        times.learn(Served(rng.randrange(2), work, rng.choice([0.0, 1e-9, 1e6, 0.1])))
        times.check()


def test_all_workers_are_predicted_as_each_alone() -> None:
    rng, times = random.Random(4), ServiceTime(8)
    for i in range(100):
        work = some_work(rng)
        times.learn(Served(i % 8, work, seconds(work, 1 + i % 8)))
    works = [some_work(rng) for _ in range(8)]
    matched = np.zeros((3, 8))
    for i, work in enumerate(works):
        matched[1:, i] = work.dram_tokens / 2, work.disk_tokens / 2
        matched[0, i] = 50_000 - work.new_tokens / 2 - matched[1:, i].sum()
    own = times.predict(50_000, matched)
    for i in range(8):
        new = 50_000 - matched[:, i].sum()
        one = times.predict_one(i, 50_000, new, matched[1, i], matched[2, i])
        assert own[i] == pytest.approx(one)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_does_not_add_up_over_many_prompts_that_are_alike(seed: int) -> None:
    """Their samples determine one figure of five."""
    rng, times = random.Random(seed), ServiceTime(2)
    for step in range(100_000):
        times.learn(Served(rng.randrange(2), Work(20, 20), rng.random() * 0.05))
        if step % 5000 == 4999:
            times.check()


@pytest.mark.parametrize("num_tokens", [50, 1000, 8000])
def test_prompts_that_are_alike_do_not_unlearn_what_they_say_nothing_of(num_tokens: int) -> None:
    """Their samples determine one figure of five; the others may not wander off meanwhile."""
    rng, times = random.Random(5), ServiceTime(2)
    work = Work(num_tokens, num_tokens)
    took_s = 0.01 + 1e-5 * num_tokens
    for i in range(300):
        times.learn(Served(i % 2, work, took_s * rng.uniform(0.8, 1.2)))
    assert 0.8 < predicted(times, work) / took_s < 3.0
