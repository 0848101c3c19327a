"""The targets of the table, in its order, and the benchmarks whose figures they are for."""

from __future__ import annotations

from table_rows import QUOTED, Goal, Row

CHAT_TRACE, AGENTS_TRACE = "conversation_trace.jsonl", "claude_code_a.jsonl.gz"
SSD_RUNS = 5
_MATCH = "get_match, 131,072 tokens"
_WAYS = {
    # Steps, and % of the way from LRU to the optimum, by the tier's size in blocks.
    "hit rate, chat": {1000: 18, 2000: 22, 5000: 21, 10000: 10, 20000: 10},
    "hit rate, chat, half of all ends known": {1000: 30, 5000: 40, 10000: 42, 20000: 55},
    "hit rate, agents": {1000: 50, 2000: 50, 5000: 24},
}  # fmt: skip
_MATCHES = (
    # How much is cached, and limits from tokens and with block_keys.
    ("all cached", "all cached", 70),
    ("first 100,000 cached", "first three quarters cached", 107),
    ("none cached", "none cached", 17),
)


def _of_matches() -> list[Goal]:
    from_tokens = [
        Goal(f"{_MATCH}: {what}", "match", f"get_match from tokens, {name}, 131,072 tokens",
             limit=limit, quoted="" if what != "all cached" else "FlexKV native 240 us")
        for what, name, limit in _MATCHES
    ]  # fmt: skip
    with_keys = [
        Goal(f"{_MATCH}, with block_keys: {what}", "match",
             f"get_match with block_keys, {name}, 131,072 tokens", limit=25)
        for what, name, _ in _MATCHES
    ]  # fmt: skip
    return [*from_tokens, *with_keys]


def _of_server() -> list[Goal]:
    return [
        Goal("through the server, with block_keys", "server",
             "match with block_keys, all cached, 1 clients", limit=200),
        Goal("through the server, from tokens", "server",
             "match from tokens, all cached, 1 clients", limit=325),
        *(Goal(f"request cycles at 128k tokens, one server, by {count}", "server",
               f"cycles, match from tokens, all cached, {count} clients", limit=3000)
          for count in (1, 4)),
        *(Goal(f"the same, beside LMCache's server, by {count}", "LMCache",
               f"cycles of 131,072 tokens, {count} clients", limit=3000) for count in (1, 4)),
    ]  # fmt: skip


def _of_data() -> list[Goal]:
    return [
        *(Goal(f"DRAM, 64 requests of 8 MiB at once, {verb}", "DRAM", verb, reach=0.9)
          for verb in ("store", "retrieve")),
        *(Goal(f"SSD, disk worker alone, {way}", "SSD", f"disk worker, {way}", reach=0.95)
          for way in ("write", "read")),
        *(Goal(f"{name}, blocks of {size} KiB, {way}", "remote",
               f"{way}, {scheme}, blocks of {size} KiB", reach=0.9)
          for name, scheme in (("Mooncake", "mooncake"), ("shared directory", "file"))
          for size in ("2,048", "400") for way in ("write", "read")),
    ]  # fmt: skip


def _of_engines() -> list[Goal]:
    ratio = "throughput, of vLLM alone"
    return [
        Goal("throughput with nothing hit, 2.6 M model, DRAM, of vLLM alone", "overhead",
             f"FlexCache, DRAM: {ratio}", limit=0.98,
             peer=f"vLLM's own offloading, DRAM: {ratio}"),
        Goal("the same, DRAM and SSD", "overhead", f"FlexCache, DRAM and SSD: {ratio}", limit=0.98,
             peer=f"vLLM's own offloading, DRAM and files: {ratio}"),
        Goal("the same, DRAM and SSD, once nothing comes back", "overhead",
             f"FlexCache, DRAM and SSD, once nothing comes back: {ratio}", limit=0.98),
        Goal("throughput with nothing hit, a core left to the rest, DRAM", "overhead, a core left",
             f"FlexCache, DRAM: {ratio}", limit=0.98),
        Goal("the same, DRAM and SSD, a core left", "overhead, a core left",
             f"FlexCache, DRAM and SSD: {ratio}", limit=0.98),
        Goal("the same, once nothing comes back, a core left", "overhead, a core left",
             f"FlexCache, DRAM and SSD, once nothing comes back: {ratio}", limit=0.98),
        Goal("look-up and put, processor time of the engine's thread", "request cost",
             "engine's thread, a request", limit=250),
        Goal("TTFT of a hit, 4,000 tokens, 136 M model: DRAM", "TTFT",
             "DRAM, beside the least it takes, 4000 tokens", reach=0.9),
        Goal("the same: SSD", "TTFT", "SSD, beside the least it takes, 4000 tokens", reach=1.0),
    ]  # fmt: skip


def _of_hit_rates() -> list[Goal]:
    goals = []
    for step, ways in _WAYS.items():
        for size, way in ways.items():
            what = f"{step}, {size:,} blocks: way from LRU to the optimum"
            goals.append(Goal(what, step, f"{size} blocks", limit=way))
        goals.append(Goal(f"{step}: least lead over LRU", step, "least lead", limit=-0.05))
    return goals


def _of_hits_beside() -> list[Goal]:
    named = [("DRAM", 1.10), ("SSD", 1.20)]
    hits = [("one", "1 hit at once"), ("four at once", "4 hits at once")]
    return [
        *(Goal(f"gap between tokens while others' hits are loaded, p99: {tier}, {count}",
               "hits beside", f"{tier}, {name}: gap between tokens, p99", reach=1.03)
          for tier, _ in named for count, name in hits),
        *(Goal(f"TTFT of those hits: {tier}, {count}", "hits beside", f"{tier}, {name}: TTFT",
               reach=reach)
          for tier, reach in named for count, name in hits),
    ]  # fmt: skip


def _of_router() -> list[Goal]:
    return [
        Goal("router: match of 8,192 blocks among 1,000 engines, p50", "router index",
             "decide, p50", limit=25),
        Goal("router: the same, p99", "router index", "decide, p99", limit=150),
        Goal("router: events applied, one core", "router index", "events", limit=0.4),
        Goal("router: a block in the index of 10^7", "router index", "memory", limit=180),
        Goal("router: decision for a 124k-token chat, next turn", "router tokens",
             "decision, next turn", limit=8),
        Goal("router: the same, all known", "router tokens", "decision, all known", limit=3),
        *(Goal(f"router: the loop stands still, {name}", "router tokens",
               f"decision, {name}, stall", limit=5) for name in ("next turn", "all known")),
        Goal("router: proxy, CPU a token", "proxy", "FlexCache: CPU per token", limit=33),
        Goal("router: proxy, CPU a request", "proxy", "FlexCache: CPU per request", limit=300),
        Goal("router", "decisions", None),
    ]  # fmt: skip


GOALS = [
    *_of_matches(),
    *_of_server(),
    *(Goal(f"allocate 4 of a full pool, 50,000 leaves, {policy}", "allocate",
           f"allocate 4 blocks, full tier, {policy}", limit=15, quoted="FlexKV native 1,464 us")
      for policy in ("lru", "density")),
    *_of_data(),
    *_of_engines(),
    *_of_hits_beside(),
    *_of_hit_rates(),
    *_of_router(),
    Goal("restart with 10^6 slots on SSD, from start() to the first hit", "restart",
         "until the first hit, 1,000,000 slots", limit=1),
    Goal("memory of the index, a block", "index memory", "memory per block, keys included",
         limit=160),
]  # fmt: skip

QUOTED_ROWS = (
    Row("router: two CPU engines, mean TTFT of round robin's", "0.54x, 0.70x",
        "first prompts of 1,500, 800 words", None, "<= 0.5x", False, QUOTED),
)  # fmt: skip
