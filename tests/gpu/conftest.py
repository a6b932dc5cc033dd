"""Tests that need a CUDA device: not collected where there is none."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
