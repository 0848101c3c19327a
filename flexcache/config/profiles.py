"""Profiles: settings to begin with for a kind of traffic, each with its reason.

Figures are those of docs/policies.md and benchmarks/bench_write_policies.py. What depends on the
machine or on rules of the house is suggested as a comment.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH = 100
_SIZES = """\
# What the machine can spare:
# cpu_cache_gb = 64
# ssd_cache_gb = 1000
# ssd_cache_dirs = ["/mnt/nvme/flexcache"]
"""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A value for a setting.

    Attributes:
        is_optional: The user has to decide: it is shown as a comment.
    """

    name: str
    value: str | float | bool
    reason: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """Suggestions for traffic of a kind, which ``traffic`` describes."""

    traffic: str
    suggestions: Sequence[Suggestion]


PROFILES: Mapping[str, Profile] = {
    "chat": Profile(
        "People who write to an assistant: some come back after minutes, most prompts never do.",
        (
            Suggestion(
                "eviction_policy", "density",
                "It learns which prompts come back: 24.5 % of an hour of chat are hits in 10,000 "
                "blocks of 512 tokens, 22.4 % under lru.",
            ),
            Suggestion(
                "ssd_write_policy", "selective",
                "Most of what is computed is never used again. In a tier of 5,000 blocks it finds "
                "17.5 % of that hour, write_through 18.0 %, and it writes a sixth as much. In "
                "10,000 blocks it is 21.7 and 24.5 %, and a fifth.",
            ),
            Suggestion(
                "layerwise_load", "auto",
                "vLLM: a hit starts within the step while nothing else runs, and does not delay "
                "others' tokens while something does.",
            ),
            Suggestion(
                "retention_s", 86_400.0,
                "What people wrote does not stay for longer than this unless it is used.",
                is_optional=True,
            ),
        ),
    ),
    "agents": Profile(
        "Agents at work: sessions of many turns, each with the whole past as its prompt, in "
        "seconds or after minutes of tools.",
        (
            Suggestion(
                "eviction_policy", "density",
                "63 % of the blocks of a coding agent's sessions are hits in 5,000 blocks of 512 "
                "tokens, 55 % under lru. Both are equal once the tier holds all open sessions.",
            ),
            Suggestion(
                "ssd_write_policy", "write_through",
                "Nearly every block is used again, 96 % in the long run, so each is written at "
                "once, and a session survives a restart.",
            ),
            Suggestion(
                "match_ttl_s", 300.0,
                "What was prefetched for the next turn waits for it this long, since tools may run "
                "for minutes.",
            ),
            Suggestion(
                "ssd_write_mb_s", 133.0,
                "Long sessions write a lot. This is three drive writes per day of a device of "
                "3.84 TB.",
                is_optional=True,
            ),
        ),
    ),
    "batch": Profile(
        "Jobs: the same instructions before many documents that are read once.",
        (
            Suggestion(
                "eviction_policy", "density",
                "Where documents are asked about several times it has up to 8.5 points more hits "
                "than lru (generated traffic); in a plain batch job they are equal.",
            ),
            Suggestion(
                "ssd_write_policy", "selective",
                "Only blocks that are seen a second time are written: the instructions, not the "
                "documents.",
            ),
            Suggestion(
                "remote_write_policy", "selective", "Likewise, if there is a remote store."
            ),
            Suggestion(
                "ssd_sync", "none",
                "After a power cut a job begins again anyway. Blocks survive a killed process all "
                "the same.",
            ),
            Suggestion(
                "ssd_write_mb_s", 133.0,
                "A job may run for days. This is three drive writes per day of a device of "
                "3.84 TB.",
                is_optional=True,
            ),
        ),
    ),
}  # fmt: skip


def render_profile(name: str) -> str:
    """Return a settings file in TOML, with a comment for each setting."""
    profile = PROFILES[name]
    parts = [
        _comment(f"FlexCache for {name}. {profile.traffic}")
        + _comment("Save this as a .toml file, set the sizes, and name it in FLEXCACHE_CONFIG."),
        _SIZES,
    ]
    for chosen in profile.suggestions:
        line = f"{chosen.name} = {json.dumps(chosen.value)}\n"
        parts.append(_comment(chosen.reason) + ("# " if chosen.is_optional else "") + line)
    return "\n".join(parts)


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return "\n".join(lines) + "\n"
