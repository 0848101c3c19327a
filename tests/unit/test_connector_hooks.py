"""The connector's hooks have the signatures of the newest vLLM, which no CPU build exists of."""

from __future__ import annotations

import json

import pytest
from connector_hooks import TABLE, Hook, read_hooks
from paths import ROOT

LEFT_TO_VLLM = {
    "role": "vLLM's own",
    "clear_connector_metadata": "vLLM's own",
    "has_connector_metadata": "vLLM's own",
    "get_mem_pool_context": "KV tensors are taken as vLLM allocates them",
    "bind_kv_cache_manager": "loads that could be lost run between steps",
    "set_host_xfer_buffer_ops": "for transports that cannot reach the device",
    "finish_forward": "copies out of a step's blocks begin in a later step",
    "reset_capture_state": "a captured graph waits for no layer",
    "get_kv_connector_kv_cache_events": "the scheduler's side knows all changes",
    "get_handshake_metadata": "workers find the cache by its address",
    "set_xfer_handshake_metadata": "workers find the cache by its address",
    "set_xfer_handshake_metadata_pp_aware": "workers find the cache by its address",
    "get_finished_count": "every rank reports",
    "register_finished_partial_tail": "only whole blocks are stored",
    "get_loaded_kv_cache_group_ids": "all groups are loaded",
}
"""Hooks that the base class's version serves, and why."""

OF_OLDER_VLLMS = {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache"}
"""Before 0.32; see `test_processes`."""


def hooks_of_ours() -> dict[str, Hook]:
    source = (ROOT / "flexcache" / "integration" / "vllm" / "connector.py").read_text()
    return read_hooks(source, ("FlexCacheConnectorV1",))


@pytest.fixture(scope="module")
def newest() -> dict[str, Hook]:
    hooks: dict[str, Hook] = json.loads(TABLE.read_text())["hooks"]
    return hooks


def test_every_hook_that_we_define_is_called_as_we_define_it(newest: dict[str, Hook]) -> None:
    ours = hooks_of_ours()
    assert ours.keys() - newest.keys() == OF_OLDER_VLLMS
    for name, hook in ours.items():
        if name in OF_OLDER_VLLMS:
            continue
        theirs = newest[name]
        assert hook["kind"] == theirs["kind"], name
        assert hook["parameters"] == theirs["parameters"], name


def test_every_other_hook_is_left_to_vllm_on_purpose(newest: dict[str, Hook]) -> None:
    ours = hooks_of_ours().keys() - OF_OLDER_VLLMS
    assert not ours & LEFT_TO_VLLM.keys()
    assert newest.keys() - ours == LEFT_TO_VLLM.keys()
    assert not any(newest[name]["is_abstract"] for name in LEFT_TO_VLLM)


def test_the_reader_sees_what_distinguishes_hooks() -> None:
    source = (
        "class C:\n"
        "    @classmethod\n    def a(cls, x: int): ...\n"
        "    @property\n    @abstractmethod\n    def b(self): ...\n"
        "    def c(self, x, *rest, y=1, **more): ...\n"
        "    def _d(self): ...\n"
    )
    assert read_hooks(source, ("C",)) == {
        "a": {"parameters": ["cls", "x"], "kind": "classmethod", "is_abstract": False},
        "b": {"parameters": ["self"], "kind": "property", "is_abstract": True},
        "c": {
            "parameters": ["self", "x", "*rest", "y=", "**more"],
            "kind": "method",
            "is_abstract": False,
        },
    }
