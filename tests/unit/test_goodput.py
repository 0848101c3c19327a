"""Goodput: the closed loop of users, and what is made of their answers."""

from __future__ import annotations

from goodput import (
    TRAFFIC,
    Level,
    Limits,
    goodput,
    measure,
    percentile,
    sessions_of,
    unloaded_answers,
)
from hypothesis import given
from hypothesis import strategies as st
from users import Answer, Turn, Users

THINK_S = 2.0
SESSIONS = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 3)),
             min_size=1, max_size=4),
    max_size=6,
)  # fmt: skip


@given(SESSIONS, st.integers(1, 3), st.data())
def test_every_turn_is_asked_once_in_order_by_as_many_users(
    sessions: list[list[Turn]], num_users: int, data: st.DataObject
) -> None:
    now = 0.0
    users = Users(sessions, num_users, THINK_S, now)
    expected = {number: list[int]() for number in range(len(sessions))}
    next_turn = dict.fromkeys(expected, 0)
    open_requests: dict[str, tuple[int, int]] = {}
    answered_at: dict[int, float] = {}
    while not users.are_done:
        for name, prompt, num_wanted in users.ask(now):
            session = int(name.split("-")[0])
            turn = sessions[session][next_turn[session]]
            expected[session] += turn[0]
            assert (prompt, num_wanted) == (expected[session], turn[1])
            if session in answered_at:
                assert now >= answered_at[session] + THINK_S
            assert session not in {asked for asked, _ in open_requests.values()}
            open_requests[name] = (session, num_wanted)
        assert len(open_requests) <= num_users
        now += 0.5
        if not open_requests:
            assert users.are_done or users.next_due_at() is not None
            continue
        name = data.draw(st.sampled_from(sorted(open_requests)))
        session, num_wanted = open_requests.pop(name)
        for count in range(1, num_wanted + 1):
            now += 0.25
            users.hear(name, [7] * count, count == num_wanted, 1, now)
        answer = users.answers[-1]
        assert (answer.session, answer.turn) == (session, next_turn[session])
        assert (answer.num_tokens, answer.last_at) == (num_wanted, now)
        assert answer.first_at == now - 0.25 * (num_wanted - 1)
        assert answer.tpot_s == (0.25 if num_wanted > 1 else 0.0)
        expected[session] += [7] * num_wanted
        next_turn[session] += 1
        answered_at[session] = now
    assert next_turn == {number: len(turns) for number, turns in enumerate(sessions)}
    assert len(users.answers) == sum(map(len, sessions))


def test_the_wait_for_an_engine_that_is_busy_counts() -> None:
    users = Users([[([1], 1), ([2], 1)]], 1, THINK_S, 0.0)
    ((name, _, _),) = users.ask(5.0)  # the engine was in a step for that long
    users.hear(name, [7], True, 0, 6.0)
    assert users.answers[0].ttft_s == 6.0
    assert users.next_due_at() == 6.0 + THINK_S
    assert not users.ask(7.9)
    ((name, prompt, _),) = users.ask(9.0)
    assert prompt == [1, 7, 2]
    users.hear(name, [7], True, 2, 9.5)
    assert users.answers[1].ttft_s == 1.5
    assert not users.are_done
    assert not users.ask(20.0)  # nothing is left: the user goes home
    assert users.are_done


def test_users_begin_one_after_the_other() -> None:
    users = Users([[([1], 1)]] * 3, 3, THINK_S, 0.0, apart_s=1.0)
    assert [len(users.ask(now)) for now in (0.0, 0.9, 1.0, 5.0)] == [1, 0, 1, 1]


def answer(ttft_s: float, tpot_s: float) -> Answer:
    return Answer(0, 0, 100, 60, 10.0, 10.0 + ttft_s, 10.0 + ttft_s + 4 * tpot_s, 5)


def test_a_request_is_in_time_if_both_its_times_are() -> None:
    limits = Limits(ttft_s=1.0, tpot_s=0.25)
    answers = [answer(1.0, 0.25), answer(1.5, 0.125), answer(0.5, 0.5), answer(0.5, 0.125)]
    level = Level.of(3, answers, 8.0, limits)
    assert level == Level(3, 0.5, 0.5, 0.75, 1.5, 0.5, 0.6)


def test_limits_are_multiples_of_an_idle_engines_median() -> None:
    unloaded = [answer(0.5, 0.125), answer(9.0, 4.0), answer(1.0, 0.25)]
    assert Limits.scaled(unloaded, 3.0) == Limits(3.0, 0.75)


def test_the_unloaded_prompts_share_nothing() -> None:
    asked: list[list[Turn]] = []

    class Idle:
        def converse(
            self, sessions: list[list[Turn]], num_users: int, think_s: float
        ) -> tuple[list[Answer], float]:
            assert num_users == 1
            asked.extend(sessions)
            return [], 0.0

    unloaded_answers(Idle(), TRAFFIC["agents"])  # type: ignore[arg-type]
    prompts = [prompt for [(prompt, _)] in asked]
    assert {len(prompt) for prompt in prompts} == {768 + 300}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)


def test_goodput_is_the_highest_rate_that_is_in_time() -> None:
    def level(rate: float, in_time: float) -> Level:
        return Level(1, rate, in_time, 0.0, 0.0, 0.0, 0.0)

    assert goodput([level(1, 1.0), level(3, 0.95), level(4, 0.94), level(2, 1.0)]) == 3
    assert goodput([level(1, 0.9)]) == goodput([]) == 0.0
    assert percentile(list(range(1, 21)), 0.95) == 19
    assert percentile([5.0], 0.95) == 5.0


class PlayedEngine:
    """An engine that answers in time up to some number of users."""

    def __init__(self, most_users: int) -> None:
        self.most_users = most_users
        self.levels: list[int] = []

    def converse(
        self, sessions: list[list[Turn]], num_users: int, think_s: float
    ) -> tuple[list[Answer], float]:
        self.levels.append(num_users)
        ttft_s = 1.0 if num_users <= self.most_users else 9.0
        return [Answer(0, 0, 1, 0, 0.0, ttft_s, ttft_s, 1)], 1.0 / num_users


def test_the_load_of_an_engine_rises_until_two_levels_are_not_in_time() -> None:
    engines = {"slow": PlayedEngine(1), "fast": PlayedEngine(100)}
    limits = Limits(ttft_s=2.0, tpot_s=1.0)
    said: list[str] = []
    found = measure(engines, TRAFFIC["chat"], [1, 2, 4, 8], limits, said.append)  # type: ignore[arg-type]
    assert [engine.levels for engine in engines.values()] == [[1, 2, 4], [1, 2, 4, 8]]
    assert {name: goodput(levels) for name, levels in found.items()} == {"slow": 1.0, "fast": 8.0}


def test_conversations_share_their_first_tokens_only() -> None:
    for traffic in TRAFFIC.values():
        one, two = sessions_of(traffic, 2, seed=1)
        assert sessions_of(traffic, 2, seed=1) == [one, two]
        (first, _), (other, _) = one[0], two[0]
        assert first[: traffic.num_shared] == other[: traffic.num_shared]
        assert first[traffic.num_shared :][:16] != other[traffic.num_shared :][:16]
        assert len(one) == traffic.num_turns
        longest = sum(len(turn[0]) + turn[1] for turn in one)
        assert longest < 4096  # what the smallest model takes
