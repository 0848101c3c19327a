"""Compiles Triton kernels for GPUs that are not here, and tells what became of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Compiled(NamedTuple):
    ptx: str
    registers: int
    spilled_bytes: int

    def count(self, access: str) -> int:
        """Count instructions of a kind in the PTX: ``ld.global.v2.b64``, say."""
        return len(re.findall(rf"\b{re.escape(access)}\b", self.ptx))


def compile_for(
    capability: int, kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, int],
    num_warps: int,
) -> Compiled:  # fmt: skip
    """Compile a kernel as a launch would; pointers are multiples of 16.

    Args:
        capability: 90 for sm_90.
        arguments: Triton's type of each argument that is no constant.
    """
    names = kernel.arg_names
    pointers = [name for name, kind in arguments.items() if kind.startswith("*")]
    source = ASTSource(
        kernel,
        {name: arguments.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]
    said = _assemble(ptx, capability)
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, said
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert len(spilled) == 2, said
    return Compiled(ptx, int(registers[1]), sum(map(int, spilled)))


def _assemble(ptx: str, capability: int) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    if not assembler.exists():
        assembler = folder / "ptxas"
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "kernel.ptx"
        file.write_text(ptx)
        options = ["-v", f"--gpu-name={target[1]}", "-o", f"{made}/kernel.cubin"]
        command = [str(assembler), *options, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
