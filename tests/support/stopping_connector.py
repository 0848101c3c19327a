"""StoppingConnector: stops its own process in a step that loads a prompt, once, when asked to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from probe_connector import ProbeConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

ASKED, STOPPED = "stop", "stopped"
"""Files in ``KV_PROBE_DIR``: which process is to stop, and the id of the one that does."""


class StoppingConnector(ProbeConnector):
    """The scheduler's process stops once the step is scheduled, a rank's before it begins it."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        self._stop_in(metadata)
        return metadata

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._stop_in(connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def _stop_in(self, metadata: Any) -> None:
        directory = Path(os.environ["KV_PROBE_DIR"])
        if not any(load.promised for load in metadata.loads) or not (directory / ASKED).exists():
            return
        own = "scheduler"
        if self.role is not KVConnectorRole.SCHEDULER:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            own = f"rank {get_tensor_model_parallel_rank()}"
        if (directory / ASKED).read_text() == own:
            (directory / ASKED).unlink()
            (directory / STOPPED).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
