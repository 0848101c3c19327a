"""The `flexcache` command: `main` puts it together, each command has a module of its own.

What a command needs it imports when it runs: torch and ZMQ would make `flexcache --help` slow.
"""

from flexcache.cli.main import app

__all__ = ["app"]
