"""Renders the documentation page of the metrics from the catalog."""

from __future__ import annotations

from itertools import groupby

from flexcache.metrics.catalog import describe_metrics

_HEAD = """# Metrics

What `/metrics` serves to Prometheus ([operations](operations.md) explains how to scrape it, and has
a dashboard and alerts). Every metric is read from `KVManager.stats()` during a scrape, and costs
nothing in between. Sizes are in bytes, times in seconds. A part that is switched off (no remote
store, no events, no trace) has no samples. `tier` is `CPU`, `SSD` or `REMOTE`.

This page is generated from the code by `scripts/make_docs.py`.
"""


def render() -> str:
    """Return the page as Markdown."""
    sections = []
    for title, rows in groupby(describe_metrics(), lambda row: row["section"]):
        lines = [
            f"\n## {title}\n",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{row['name']}` | {row['type']} | {row['labels']} | {row['meaning']} |"
            for row in rows
        ]
        sections.append("\n".join(lines) + "\n")
    return _HEAD + "".join(sections)
