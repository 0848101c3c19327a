"""A file of workers, read again when it changes."""

from __future__ import annotations

import logging
import os

from flexcache.config.sources import read_file
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.logs import log_event
from flexcache.router.discovery.listing import Listing, parse_table

logger = logging.getLogger(__name__)


class WorkerFile:
    """A file that lists workers; other settings may stand beside them.

    Attributes:
        listing: The last one that was valid.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
        MissingDependencyError: Its format needs a package that is not installed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._version = self._read_version()
        self._fault: str | None = None
        self.listing: Listing = parse_table(read_file(path, "worker_file"))

    def reread(self) -> bool:
        """Read the file again if it changed; a wrong one leaves the listing as it is.

        Returns:
            Whether the listing is another one.
        """
        version = self._read_version()
        if version == self._version:
            return False
        before = self.listing
        try:
            self.listing = parse_table(read_file(self._path, "worker_file"))
        except (ConfigError, MissingDependencyError) as error:
            self._note(str(error))
        else:
            self._note(None)
        self._version = version
        return self.listing != before

    def _note(self, fault: str | None) -> None:
        """Log a fault when it appears, and its end."""
        if fault == self._fault:
            return
        self._fault = fault
        if fault is None:
            log_event(logger, logging.INFO, "worker_file_recovered", path=self._path)
        else:
            log_event(logger, logging.WARNING, "worker_file_rejected", path=self._path, error=fault)

    def _read_version(self) -> tuple[int, int, int] | None:
        """Return what changes with the content, also where a link is set to another file, as
        Kubernetes does; None if the file is missing."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
