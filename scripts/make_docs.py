"""Write the parts of the documentation that are generated from the code.

python scripts/make_docs.py            write configuration.md and metrics.md of docs/operate
python scripts/make_docs.py --check    fail if they differ from the code
"""

from __future__ import annotations

import sys
from pathlib import Path

from flexcache.config.router import RouterConfig
from flexcache.config.settings import Setting, describe_settings
from flexcache.counters import families
from flexcache.integration.adapter import COUNTERS, VLLM_COUNTERS
from flexcache.router.stats import RouterStats
from flexcache.stats import Stats

DOCS = Path(__file__).resolve().parents[1] / "docs" / "operate"

HEAD = """# Configuration

Every setting is a field of `CacheConfig`, an environment variable, a key of the file that
`FLEXCACHE_CONFIG` names (`.json`, `.toml`, `.yaml`),
and in vLLM a key of `kv_connector_extra_config`. Later sources override earlier ones: default,
file, environment, arguments.

```bash
flexcache config                  # the values in effect and where each comes from; secrets masked
flexcache config --describe       # with variables and meanings; --config FILE: another file; --json
flexcache config --profile chat   # a file to begin with, with reasons; or agents, batch
```

* The exit status is 1 if a setting is unknown or invalid. An error names the variable, file or
  table, and the closest known names.
* What can be judged only with a model, such as a quota in bytes, is checked by `flexcache doctor
  --config FILE` and at startup.
* What vLLM is given in `kv_connector_extra_config` comes on top, and `flexcache config` does not
  see it. vLLM sets `tokens_per_block` itself.
* In Python, `CacheConfig.from_env(...)` reads all sources. `CacheConfig(...)` takes its arguments
  and defaults only.
* `flexcache server` takes the same settings; its file may also have a table `model` and
  `idle_exit_s` ([shared server](../guide/shared_server.md)).
* Every path of a setting is absolute or begins with `~`. Variables such as `$HOME`, quotes, empty
  and repeated directories are refused.
  Arguments of commands (`flexcache doctor DIR`, `--config FILE`, `--tls-cert FILE`) may be
  relative.
* Kubernetes sets variables for each Service of a namespace. Those of Services named `flexcache` or
  `flexcache-...` are ignored (`service_variables_ignored`):
  `FLEXCACHE_..._SERVICE_HOST`, `..._SERVICE_PORT`, `..._PORT_8000_TCP` and the like, and any
  `..._PORT` whose value begins with `tcp://`.
  `enableServiceLinks: false` in a pod leaves them out.

The tables are generated from the code by `scripts/make_docs.py`.

"""

ROUTER = """
## Router

`flexcache router` has settings of its own: options of the command, the variables below, and keys of
the file that `--config` or `FLEXCACHE_ROUTER_CONFIG` names. In a variable, items of a list are
separated by spaces.

"""

COLUMNS = """| setting | environment | default | unit | meaning |
| --- | --- | --- | --- | --- |
"""


METRICS_HEAD = """# Metrics

What `/metrics` serves to Prometheus. [Operations](operations.md) explains how to scrape it, and has
a dashboard and alerts.
A [router](router.md) has metrics of its own, on its control port.

* Sizes are in bytes, times in seconds. Between scrapes there is no cost.
* A part that is switched off (no remote store, no events, no trace) has no samples.
* `tier` is `CPU`, `SSD`, `PEER` or `REMOTE`; of a router `gpu`, `dram` or `disk`.
* In models with windows or states, blocks of a tier include those of tails, and each counts with as
  many tokens as any other. Hits count prefixes only.

This page is generated from the code by `scripts/make_docs.py`.
"""


ENGINES_OWN = """
## At the engines' own `/metrics`

Counters of one engine, with the labels of its own metrics.

| metric | meaning |
| --- | --- |
"""


def render_settings() -> str:
    return HEAD + _table(describe_settings()) + ROUTER + _table(describe_settings(RouterConfig))


def _table(settings: list[Setting]) -> str:
    rows = [
        f"| `{row.name}` | `{row.environment}` | {row.default_text} | {row.unit} | {row.meaning} |"
        for row in settings
    ]
    return COLUMNS + "\n".join(rows) + "\n"


def render_metrics() -> str:
    rows: dict[str, list[str]] = {}
    for each in (*families(Stats), *families(RouterStats)):
        labels = ", ".join(each.labels)
        row = f"| `{each.name}` | {each.type.value} | {labels} | {each.help} |\n"
        rows.setdefault(each.section, []).append(row)
    columns = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
    tables = (f"\n## {title}\n\n{columns}" + "".join(lines) for title, lines in rows.items())
    return METRICS_HEAD + "".join(tables) + _engines_own()


def _engines_own() -> str:
    engines = {
        name: ("vllm", "sglang") if name in COUNTERS else ("vllm",) for name in VLLM_COUNTERS
    }
    names = {n: ", ".join(f"`{e}:flexcache_{n}_total`" for e in of) for n, of in engines.items()}
    rows = [f"| {names[name]} | {text} |\n" for name, text in VLLM_COUNTERS.items()]
    return ENGINES_OWN + "".join(rows)


PAGES = {"configuration.md": render_settings, "metrics.md": render_metrics}


if __name__ == "__main__":
    for name, render in PAGES.items():
        path = DOCS / name
        if "--check" not in sys.argv[1:]:
            path.write_text(render())
        elif not path.exists() or path.read_text() != render():
            sys.exit(f"docs/operate/{name} is out of date: run scripts/make_docs.py")
