"""Arguments that make no prompt: refused by name, before anything is reserved or observed."""

from __future__ import annotations

from typing import Any

import pytest

from flexcache.cache.prompt import PromptMaker
from flexcache.ids import PromptDetail, RequestInfo, TaskKind

TOKENS = list(range(8))
HALF_A_PAIR = "\ud800"


@pytest.mark.parametrize("detail", PromptDetail)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", None),
        ("token_ids", 5),
        ("token_ids", iter(TOKENS)),
        ("token_ids", [[1, 2], [3, 4]]),
        ("token_ids", [1.5]),
        ("token_mask", range(0, 8, 2)),
        ("token_mask", range(-1, 8)),
        ("token_mask", [True]),
        ("namespace", 5),
        ("namespace", ["a", 5]),
        ("namespace", HALF_A_PAIR),
        ("namespace", ["a", HALF_A_PAIR]),
        ("block_keys", 5),
        ("block_keys", iter([b"a", b"b"])),
        ("block_keys", {"a": b"b"}),
        ("block_keys", "ab"),
        ("block_keys", [b"a", "b"]),
        ("block_keys", [b"a", b""]),
        ("request_info", "request 1"),
        ("request_info", RequestInfo(request_id=5)),  # type: ignore[arg-type]
        ("request_info", RequestInfo(request_id=HALF_A_PAIR)),
        ("request_info", RequestInfo(lora_id="x")),  # type: ignore[arg-type]
        ("request_info", RequestInfo(lora_id=2**70)),
        ("request_info", RequestInfo(lora_name=5)),  # type: ignore[arg-type]
        ("request_info", RequestInfo(extra_keys=5)),  # type: ignore[arg-type]
        ("request_info", RequestInfo(extra_keys=[object()])),
    ],
)
def test_what_makes_no_prompt_is_refused_by_name(
    name: str, value: Any, detail: PromptDetail
) -> None:
    maker = PromptMaker("model", 2, lambda: detail)
    arguments = {"token_ids": TOKENS, name: value}
    with pytest.raises(ValueError, match=name):
        maker.make(TaskKind.GET, **arguments)


@pytest.mark.parametrize("namespace", [[], (), 5, ["a", 5], HALF_A_PAIR])
@pytest.mark.parametrize("adapter", ["", "its digest"])
def test_what_names_no_namespace_has_no_roots(namespace: Any, adapter: str) -> None:
    """No parts least of all: their roots are those of all prompts without a namespace."""
    maker = PromptMaker("model", 2, lambda: PromptDetail.NOTHING)
    with pytest.raises(ValueError, match="namespace"):
        maker.roots(namespace, adapter)
