"""What SGLang engines with FlexCache behind their trees find of each other's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_engine import (
    TinyEngine,
    apart,
    check_again,
    engine_with_linker,
    forget_gpu,
    linker_of,
    manager_of,
    prompt,
    remember,
)
from stores import PATIENT

NEAR, FAR = prompt(200), prompt(200, seed=1)


def write(path: Path, results: Any) -> None:
    outputs, kv_bytes = results
    path.write_text(json.dumps([outputs, [layer.hex() for layer in kv_bytes]]))


def read(path: Path) -> Any:
    outputs, kv_bytes = json.loads(path.read_text())
    return outputs, [bytes.fromhex(layer) for layer in kv_bytes]


def engine_with_store(path: Path) -> TinyEngine:
    engine = engine_with_linker(str(path / "ssd"), remote_url=f"file://{path}/store", **PATIENT)
    engine.step_until(lambda: manager_of(engine).stats()["tiers"]["REMOTE"]["available"])
    return engine


def store_in_tiers(directory: str) -> None:
    path = Path(directory)
    engine = engine_with_store(path)
    cold = remember(engine, FAR)
    forget_gpu(engine, "CPU", "SSD")
    check_again(engine, FAR, 192, cold)  # from the store
    assert manager_of(engine).stats()["engine"]["hit_blocks"]["REMOTE"] >= 12
    forget_gpu(engine, "CPU", "SSD")
    write(path / "far", cold)
    write(path / "near", remember(engine, NEAR))
    forget_gpu(engine)
    linker_of(engine).close()


def load_after_restart(directory: str) -> None:
    path = Path(directory)
    engine = engine_with_store(path)
    for name, tokens, tier in (("near", NEAR, "SSD"), ("far", FAR, "REMOTE")):
        check_again(engine, tokens, 192, read(path / name))
        assert manager_of(engine).stats()["engine"]["hit_blocks"][tier] >= 12


def test_ssd_and_remote_store_outlive_the_engine(tmp_path: Path) -> None:
    apart(store_in_tiers, str(tmp_path))
    apart(load_after_restart, str(tmp_path))


def engine_at(path: Path) -> TinyEngine:
    return engine_with_linker(endpoint=f"ipc://{path}/cache.sock")


def first_engine(directory: str) -> None:
    path = Path(directory)
    engine = engine_at(path)
    cold = remember(engine, NEAR)
    forget_gpu(engine)
    write(path / "near", cold)
    apart(second_engine, directory)
    check_again(engine, FAR, 192, read(path / "far"))
    check_again(engine, NEAR, 192, cold)


def second_engine(directory: str) -> None:
    path = Path(directory)
    engine = engine_at(path)
    check_again(engine, NEAR, 192, read(path / "near"))
    write(path / "far", remember(engine, FAR))
    forget_gpu(engine)


def test_two_engines_at_one_server_load_what_the_other_has_stored(tmp_path: Path) -> None:
    apart(first_engine, str(tmp_path))
