"""The table of hooks, which unit tests compare the connector with, is that of the newest vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm
from connector_hooks import TABLE, read_hooks
from vllm.distributed.kv_transfer.kv_connector.v1 import base

pytestmark = pytest.mark.newest


def test_the_table_has_the_hooks_of_its_release() -> None:
    table = json.loads(TABLE.read_text())
    if vllm.__version__.partition("+")[0] != table["vllm"]:
        pytest.skip(f"the table is of vLLM {table['vllm']} (scripts/test.sh all tests with it)")
    assert read_hooks(Path(base.__file__).read_text()) == table["hooks"]
