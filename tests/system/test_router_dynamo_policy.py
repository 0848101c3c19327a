"""The policy `dynamo` decides as Dynamo's own SelectionService does, fed the same state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from router_peers import BLOCK, DynamoSelection, peer_python, source_of, wait

from flexcache.events.publisher import Address, BatchPublisher
from flexcache.events.wire import BlockStored, Event, encode_batch
from flexcache.router.dispatcher import GPU, Dispatcher, MatchedPrompt
from flexcache.router.policy import make_policy

NUM_WORKERS = 4
NUM_REQUESTS = 600
ANY_PORT = "tcp://127.0.0.1:0"


class Conversation:
    """A prompt that grows; ``names`` are its blocks' keys, equal on all workers."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number = number
        self.tokens: list[int] = [number % 3] * (4 * BLOCK)  # a shared system prompt
        self.extend(rng)

    def extend(self, rng: random.Random) -> None:
        self.tokens += [rng.randrange(100, 50_000) for _ in range(rng.randrange(5, 40 * BLOCK))]

    @property
    def names(self) -> list[int]:
        """A key per whole block that stands for all tokens up to its end."""
        ends = range(BLOCK, len(self.tokens) + 1, BLOCK)
        return [hash(tuple(self.tokens[:end])) & (2**62 - 1) for end in ends]


class Both:
    """SelectionService and the policy `dynamo`, in the same state."""

    def __init__(self, python: str, publishers: list[BatchPublisher[Event]]) -> None:
        self._publishers = publishers
        self.service = DynamoSelection(python, [source_of(each) for each in publishers])
        self.dispatcher = Dispatcher(make_policy("dynamo"), NUM_WORKERS)
        self.held: list[set[int]] = [set() for _ in range(NUM_WORKERS)]
        for worker in range(NUM_WORKERS):
            wait(lambda worker=worker: self._is_connected(worker))  # type: ignore[misc]

    def _is_connected(self, worker: int) -> bool:
        """Publish a block of no conversation; an event before the subscription would be lost."""
        tokens = [90_000 + worker] * BLOCK
        self._publishers[worker].publish(
            [BlockStored([worker + 1], None, tokens, BLOCK, None, "GPU", None)]
        )
        return self._overlap(worker, tokens) == 1

    def route(self, name: str, conversation: Conversation) -> tuple[set[int], int]:
        """Route a request; returns the workers that are best for the policy, and Dynamo's choice,
        which both follow."""
        keys = conversation.names
        matched = np.zeros((3, NUM_WORKERS))
        for worker, held in enumerate(self.held):
            depth = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            matched[GPU, worker] = depth * BLOCK
        prompt = MatchedPrompt(len(conversation.tokens), matched, keys=keys, block_tokens=BLOCK)
        costs = self.dispatcher.score(prompt, 0.0).costs
        answer = self.service.call(
            "select_and_reserve", model_name="model", token_ids=conversation.tokens,
            selection_id=name,
        )  # fmt: skip
        theirs = int(answer["worker_id"])
        self.dispatcher.choose(name, prompt, 0.0, np.arange(NUM_WORKERS) == theirs)
        return {int(w) for w in np.flatnonzero(costs <= costs.min() + 1e-9)}, theirs

    def computed(self, name: str, worker: int, conversation: Conversation) -> None:
        """The first token is there, and the prompt's blocks are cached."""
        self.dispatcher.first_token(name, 0.0)
        self.service.note("prefill_complete", name)
        keys = conversation.names
        start = next((i for i, k in enumerate(keys) if k not in self.held[worker]), len(keys))
        if start == len(keys):
            return
        tokens = conversation.tokens[start * BLOCK : len(keys) * BLOCK]
        parent = keys[start - 1] if start else None
        event = BlockStored([*keys[start:]], parent, tokens, BLOCK, None, "GPU", None)
        self._publishers[worker].publish([event])
        self.held[worker].update(keys)
        wait(lambda: self._overlap(worker, conversation.tokens) >= len(keys))

    def _overlap(self, worker: int, tokens: list[int]) -> int:
        answer = self.service.call("overlap_scores", model_name="model", token_ids=tokens)
        for each in answer["workers"]:
            if each["worker_id"] == worker:
                return int(each["device_blocks"])
        return 0

    def ended(self, name: str) -> None:
        self.dispatcher.ended(name, 0.0)
        self.service.note("free_reservation", name)


@pytest.fixture
def both() -> Iterator[Both]:
    python = peer_python("dyn")
    if python is None:
        pytest.skip("ROUTER_PEERS_DIR has no environment 'dyn' with ai-dynamo-runtime")
    with ExitStack() as stack:
        publishers: list[BatchPublisher[Event]] = []
        for _ in range(NUM_WORKERS):
            publisher = BatchPublisher[Event](
                Address(ANY_PORT, ANY_PORT, ""),
                encode_batch,
                num_kept=10_000,
                num_queued=10_000,
            )
            publisher.start()
            stack.callback(publisher.close)
            publishers.append(publisher)
        made = Both(python, publishers)
        stack.callback(made.service.close)
        yield made


def test_its_decisions_are_those_of_the_real_one(both: Both) -> None:
    rng = random.Random(3)
    conversations = [Conversation(number, rng) for number in range(24)]
    waiting: dict[str, tuple[int, Conversation]] = {}
    decoding: list[str] = []
    num_ties = num_wrong = num_decided = 0
    for i in range(NUM_REQUESTS):
        conversation = rng.choice(conversations)
        best, theirs = both.route(f"{i}", conversation)
        waiting[f"{i}"] = theirs, conversation
        num_ties += len(best) > 1
        num_decided += len(best) == 1
        num_wrong += theirs not in best
        while waiting and rng.random() < 0.6:
            name = next(iter(waiting))
            both.computed(name, *waiting.pop(name))
            decoding.append(name)
        while len(decoding) > 8 or (decoding and rng.random() < 0.3):
            both.ended(decoding.pop(rng.randrange(len(decoding))))
        if conversation not in [each for _, each in waiting.values()] and rng.random() < 0.7:
            conversation.extend(rng)
            if len(conversation.tokens) > 400 * BLOCK:
                conversations[conversations.index(conversation)] = Conversation(100 + i, rng)
    both.dispatcher.check()
    assert num_decided > NUM_REQUESTS / 2
    assert num_wrong <= 0.01 * num_decided, f"{num_wrong} of {num_decided}, {num_ties} ties"
