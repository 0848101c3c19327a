"""Kernels as Triton compiles them for GPUs that are not here, read off the machine code.

Run as ``python compiled_kernel.py REQUEST``: in a process of its own, since there are several
Tritons, and LLVM ends the process if it does not know a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paths import ROOT

_PATIENCE_S = 300.0


def find_tritons() -> list[Path]:
    """Return the folders with a Triton: those named in TRITON_PATHS, and the installed one's."""
    folders = filter(None, os.environ.get("TRITON_PATHS", "").split(os.pathsep))
    installed = importlib.util.find_spec("triton")
    origin = [] if installed is None or installed.origin is None else [installed.origin]
    return [*map(Path, folders), *(Path(file).parents[1] for file in origin)]


def capabilities_of(triton: Path) -> list[int]:
    """Return the GPUs to compile for: sm_80 to sm_120, if this Triton knows them all."""
    text = (triton / "triton" / "__init__.py").read_text()
    version = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    assert version is not None, text[:200]
    knows_all = (int(version[1]), int(version[2])) >= (3, 3)
    return [80, 86, 89, 90, *([100, 103, 120] if knows_all else [])]


@dataclass(frozen=True)
class Kernel:
    """A kernel as Triton is asked to compile it.

    Attributes:
        source: The module's file.
        signature: Types of its arguments. Pointers are multiples of 16, as those of tensors are.
        constants: Values of the arguments that are constants.
    """

    source: Path
    function: str
    signature: Mapping[str, str]
    constants: Mapping[str, int]
    num_warps: int


@dataclass(frozen=True)
class Compiled:
    """The machine code for one GPU.

    Attributes:
        registers: Of a thread.
        local_bytes: Memory of a thread for what its registers do not hold.
        accesses: Number of instructions that access global memory, by kind and width, such as
            ``"LDG 128"``.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    accesses: Mapping[str, int]


def compile_kernel(
    kernel: Kernel, triton: Path, capabilities: Sequence[int]
) -> dict[int, Compiled]:
    """Compile a kernel with the Triton in a folder, for GPUs with these compute capabilities.

    Raises:
        AssertionError: It cannot be compiled.
    """
    request = {"kernel": asdict(kernel), "capabilities": list(capabilities)}
    path = [str(triton), str(ROOT), str(Path(__file__).parent)]
    with tempfile.TemporaryDirectory() as cache:
        changes = {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(request, default=str)],
            env=os.environ | changes, capture_output=True, text=True, timeout=_PATIENCE_S,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]  # where Triton also puts its warnings
    made = json.loads(done.stdout)
    return {int(capability): Compiled(**code) for capability, code in made.items()}


def interpret(program: str, triton: Path) -> str:
    """Run a program whose kernels the Triton in a folder interprets; return what it printed."""
    path = os.pathsep.join([str(triton), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=_PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout  # Triton may warn on the other


def _main(request: dict[str, Any]) -> dict[int, dict[str, Any]]:
    kernel = Kernel(**request["kernel"])
    spec = importlib.util.spec_from_file_location("kernel_module", kernel.source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, kernel.function)
    return {each: asdict(_compile(kernel, function, each)) for each in request["capabilities"]}


def _compile(kernel: Kernel, function: Any, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    made = triton.compile(
        _as_source(kernel, function),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernel.num_warps},
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _ask("cuobjdump", "-res-usage", file.name)
        code = _ask("nvdisasm", "-c", file.name)
    used = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    accesses: dict[str, int] = {}
    for kind, width in re.findall(r"\b(LDG|STG)\.E(?:\.(?:CONSTANT|EF|EL|LU))*(?:\.(\w+))?", code):
        name = f"{kind} {width or '32'}"
        accesses[name] = accesses.get(name, 0) + 1
    return Compiled(used["REG"], used["STACK"] + used["LOCAL"], used["SHARED"], accesses)


def _as_source(kernel: Kernel, function: Any) -> Any:
    """Describe the arguments; Triton 3.3 has changed how that is done."""
    from triton.backends import compiler
    from triton.compiler import ASTSource

    signature, constants = dict(kernel.signature), dict(kernel.constants)
    aligned = [i for i, name in enumerate(function.arg_names) if signature.get(name, "")[:1] == "*"]
    if hasattr(compiler, "AttrsDescriptor"):
        hints = compiler.AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
        return ASTSource(function, signature, constants, hints)
    signature |= dict.fromkeys(constants, "constexpr")
    hints = {(index,): [["tt.divisibility", 16]] for index in aligned}
    return ASTSource(function, signature, constants, hints)


def _ask(tool: str, *arguments: str) -> str:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return subprocess.run(
        [tools / tool, *arguments], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))
