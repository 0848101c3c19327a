"""vLLM's OpenAI server, started in the environment of any arm: `python vllm_server.py OPTIONS`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from api_server import serve
from engines import hide_numba_from_vllm

if find_spec("lmcache"):
    hide_numba_from_vllm()  # not below: vLLM may start processes that import this file again

if __name__ == "__main__":
    serve(sys.argv[1:])
