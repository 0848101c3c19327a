"""Writes the parts of the documentation that are made from the code.

python scripts/make_docs.py            writes docs/configuration.md
python scripts/make_docs.py --check    fails if it is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from flexcache.config import describe_settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

Every setting is a field of `CacheConfig`, an environment variable, a key of the file that
`FLEXCACHE_CONFIG` names (`.json`, `.toml`, `.yaml`), and in vLLM a key of
`kv_connector_extra_config`.
Later beats earlier: default, file, environment, arguments. A name that does not exist is refused,
with the closest ones that do. vLLM sets `tokens_per_block` itself. `flexcache server` takes the
same settings; its file may also have a table `model` and `idle_exit_s` (see protocol.md).

This table is made from the code by `scripts/make_docs.py`; `flexcache config` prints it too.

| setting | environment | default | unit | meaning |
| --- | --- | --- | --- | --- |
"""


def render() -> str:
    rows = [
        f"| `{row['field']}` | `{row['environment']}` | {row['default']} | {row['unit']} "
        f"| {row['meaning']} |"
        for row in describe_settings()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != render():
            sys.exit("docs/configuration.md is out of date: run scripts/make_docs.py")
    else:
        PAGE.write_text(render())
