"""vllm serve on Model Runner V2 under Triton's interpreter: python v2_server.py serve MODEL … (slow: a token or less a second).

The engine's processes are spawned, so they import this file again, and with it the interpreted kernels.
"""

import os

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import interpreted  # noqa: F401 (before vLLM)
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main()
