"""The `flexcache` command: `main` assembles it, and each command has its own module.

A command imports what it needs when it runs: torch and ZMQ would make `flexcache --help` slow.
"""

from flexcache.cli.main import app

__all__ = ["app"]
