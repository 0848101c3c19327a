"""`flexcache doctor` on fake GPUs: child processes meet a driver that works, lies or crashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_gpu_process import CUDA_OF_TORCH, environment
from typer.testing import CliRunner

from flexcache.cli import app
from flexcache.doctor import checks as examination
from flexcache.doctor import gpu
from flexcache.doctor.subject import Finding, Level, Subject
from flexcache.errors import ConfigError
from flexcache.storage import host_pool
from flexcache.storage.pool_directory import supports_direct_io

OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR
NUM_BLOCKS = 4

ON_FIRST_GPU = """
import os, sys
from flexcache.transfer.cuda_driver import CudaDriver
if '"gpu":0' in sys.argv[1]:
"""
CRASH = ON_FIRST_GPU + "    CudaDriver.copy_batch = lambda *_: os.abort()"
REFUSE = (
    ON_FIRST_GPU
    + """
    for name in ("cuMemcpyBatchAsync", "cuMemcpyAsync", "kernel"):
        gpu.refuse(name)
    kernel.error = RuntimeError("no kernel either")
"""
)
# What a rank of the second GPU would do without setting its device first.
USE_FIRST_GPU_TOO = """
from flexcache.transfer.cuda_copier import CudaStreams
CudaStreams.bind = lambda self: self._driver.bind(self._context)
"""

Examine = Callable[..., list[Finding]]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Return the findings on so many GPUs, after the one about the driver."""
    monkeypatch.setattr(gpu, "_NUM_BLOCKS", NUM_BLOCKS)
    monkeypatch.setattr(torch.version, "cuda", CUDA_OF_TORCH)

    def examine(
        num_gpus: int = 1, setup: str = "", settings: dict[str, str] | None = None
    ) -> list[Finding]:
        for name, value in environment(tmp_path, num_gpus, setup).items():
            monkeypatch.setenv(name, value)
        found = list(gpu.check_gpu(Subject(environ=settings or {})))
        assert f"{num_gpus} GPUs" in found[0].text
        return found[1:]

    return examine


def rows(finding: Finding) -> list[list[str]]:
    """Cells of the tables."""
    lines = finding.details.split("\n")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_each_way_copies_right_bytes_on_each_gpu_and_uses_that_gpu_only(examine: Examine) -> None:
    found = examine(2)
    assert [finding.level for finding in found] == [OK] * 7
    for index, way in enumerate(("batched copy", "single copies", "kernel")):
        assert f"GPU 1, {way}: all bytes right" in found[3 + index].text
    table = rows(found[-1])
    copied = [row for row in table if row[:2] == ["1", "kernel"]]
    assert [row[2:4] for row in copied] == [["H2D", "right"], ["D2H", "right"]]
    assert all(float(rate) > 0 for row in copied for rate in row[4:])
    assert ["1", "Fake GPU 1", "0000:3C:00.0", "", ""] in table
    [grown] = [row for row in table if row[:1] == ["while GPU 1 copies"]]
    assert grown[1] == "+0" and int(grown[2]) > 300
    assert "hugepages = 'transparent', pinned" in found[-1].details


def test_a_way_that_copies_wrong_bytes_is_named_and_the_others_are_tried(examine: Examine) -> None:
    batch, single, _kernel, table = examine(
        setup="gpu.corrupt('cuMemcpyBatchAsync', to_device=False)"
    )
    assert (batch.level, single.level) == (WARNING, OK)
    assert "batched copy: D2H failed (runs: 1): 1 bytes differ" in batch.text
    assert ["0", "batched copy", "H2D", "right", "", "", ""] in rows(table)


@pytest.mark.whole
def test_bytes_that_are_wrong_in_the_pools_memory_only_are_noticed(examine: Examine) -> None:
    setup = """
from flexcache.transfer.cuda_copier import CudaCopier
attach = CudaCopier.attach
def attach_then_corrupt(self, *arguments):
    attach(self, *arguments)
    gpu.corrupt("cuMemcpyAsync", to_device=True)
CudaCopier.attach = attach_then_corrupt
"""
    batch, single, _kernel, _table = examine(setup=setup)
    assert (batch.level, single.level) == (OK, WARNING)
    assert "H2D failed (runs: 1)" in single.text


@pytest.mark.whole
def test_memory_that_cannot_be_pinned_is_named(examine: Examine) -> None:
    found = examine(setup="gpu.set_faults(most_pinned=0)")
    assert [finding.level for finding in found] == [WARNING, OK, OK, WARNING, OK]
    assert "does not pin host memory" in found[0].text
    assert "not pinned" in found[-1].details


@pytest.mark.whole
@pytest.mark.parametrize(
    ("setup", "why"),
    [
        (CRASH, "killed by SIGABRT, in this step: attach the pool"),
        (REFUSE, "StorageError: no way of copying to cuda:0 and back works: batched copy: H2D"),
    ],
    ids=["the driver crashes", "no way works"],
)
def test_a_gpu_that_cannot_be_used_is_an_error_and_the_next_is_still_tried(
    examine: Examine, setup: str, why: str
) -> None:
    found = examine(2, setup)
    assert found[0].level is ERROR
    assert f"GPU 0 cannot be used: {why}" in found[0].text
    assert [finding.text[:5] for finding in found if finding.level is OK][:3] == ["GPU 1"] * 3
    assert any(row[:2] == ["0", "as a rank"] and why in row[3] for row in rows(found[-1]))


@pytest.mark.whole
def test_a_rank_that_takes_memory_of_another_gpu_is_named(examine: Examine) -> None:
    found = examine(2, USE_FIRST_GPU_TOO)
    [named] = [finding for finding in found if finding.level is not OK]
    assert "while GPU 1 was tried, 0.3 GB more of GPU 0 was used" in named.text


@pytest.mark.whole
def test_too_few_reserved_huge_pages_are_named_and_others_are_used(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> int:
        raise ConfigError("too few pages")

    monkeypatch.setattr(host_pool, "_reserved_memory", refuse)
    found = examine(settings={"FLEXCACHE_HUGEPAGES": "reserved"})
    assert "transparent huge pages: too few pages" in found[0].text
    assert [finding.level for finding in found[1:]] == [OK] * 4


@pytest.mark.whole
def test_the_memory_of_each_gpu_is_on_its_node(examine: Examine, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    found = examine(2, f"""
from flexcache.storage import machine

def prefer(address, size, node):
    with open({str(asked)!r}, "a") as file:
        print(node, file=file)
    return ""

machine.count_nodes = lambda: 2
machine.node_of_pci = lambda address: int("3C" in address)
machine.prefer_node = prefer
""")  # fmt: skip
    assert [finding.level for finding in found] == [OK] * 7
    assert asked.read_text() == "0\n1\n"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("", ""),
        ("digests.is_wrong = True", "StorageError: a page read by cuFile is"),
        (
            "gpu.refuse('cuFileHandleRegister', 5008)",
            "cuFileHandleRegister failed: this file system",
        ),
        ("gpu.be_compatible()", "cuFile is in its compatibility mode"),
    ],
    ids=["works", "wrong checksums", "refused", "compatible"],
)
def test_a_file_in_each_ssd_directory_is_read_past_dram(
    examine: Examine, tmp_path: Path, setup: str, why: str
) -> None:
    directory = tmp_path / "ssd"
    directory.mkdir()
    if not supports_direct_io(directory):
        pytest.skip("no O_DIRECT here")
    settings = {
        "FLEXCACHE_CPU_CACHE_GB": "1", "FLEXCACHE_SSD_CACHE_GB": "1",
        "FLEXCACHE_SSD_CACHE_DIRS": str(directory),
    }  # fmt: skip
    found = examine(setup=setup, settings=settings)
    *_, past_dram, table = found
    assert past_dram.level is OK
    assert (f"goes through DRAM: {why}" if why else "can go past DRAM") in past_dram.text
    [row] = [row for row in rows(table) if row[1:2] == [f"past DRAM, {directory}"]]
    assert row[3].startswith(f"not available: {why}" if why else "right")
    assert not list(directory.iterdir())


@pytest.mark.whole
def test_the_command_prints_the_tables_as_they_are_and_as_json(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = examine()[-1]
    monkeypatch.setattr(examination, "CHECKS", {"gpu": lambda _: [finding]})
    said = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "40"}).stdout
    assert finding.details in said
    said = CliRunner().invoke(app, ["doctor", "--json"]).stdout
    assert json.loads(said)["findings"][0]["details"] == finding.details
