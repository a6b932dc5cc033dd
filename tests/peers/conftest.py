"""Tests beside other people's servers: only where their environment is named. `make vllm` does."""

import os

collect_ignore = [] if os.environ.get("VLLM_PYTHON") else ["test_vllm.py"]
