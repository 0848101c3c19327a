"""The hooks of vLLM's KV connector interface, read from its source without importing it.

    python tests/support/connector_hooks.py vllm-0.33.0-...whl > tests/support/connector_hooks.json

(`pip download --no-deps vllm==0.33.0` fetches the wheel.)
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
TABLE = Path(__file__).with_suffix(".json")
INTERFACES = ("KVConnectorBase_V1", "SupportsHMA")

Hook = dict[str, Any]
"""``parameters``: names and kinds, without types; ``kind`` of method; ``is_abstract``."""


def read_hooks(source: str, class_names: tuple[str, ...] = INTERFACES) -> dict[str, Hook]:
    """Return the public methods and properties of classes, by name."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {
        method.name: _hook(method)
        for node in classes
        if node.name in class_names
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    }


def _hook(method: ast.FunctionDef) -> Hook:
    decorators = [ast.unparse(decorator) for decorator in method.decorator_list]
    kinds = [name for name in ("classmethod", "staticmethod", "property") if name in decorators]
    return {
        "parameters": list(_parameters(method.args)),
        "kind": kinds[0] if kinds else "method",
        "is_abstract": "abstractmethod" in decorators,
    }


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    for argument in (*arguments.posonlyargs, *arguments.args):
        yield argument.arg
    if arguments.vararg is not None:
        yield f"*{arguments.vararg.arg}"
    for argument in arguments.kwonlyargs:
        yield f"{argument.arg}="
    if arguments.kwarg is not None:
        yield f"**{arguments.kwarg.arg}"


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        hooks = read_hooks(archive.read(BASE).decode())
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(hook)}" for name, hook in hooks.items())
    version = Path(wheel).name.split("-")[1]
    print(f'{{"vllm": "{version}", "hooks": {{\n{rows}\n}}}}')


if __name__ == "__main__":
    main(sys.argv[1])
