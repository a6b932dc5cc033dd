"""How much memory this process may still take."""

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")  # version 2; in a container it shows the container's own limit


def free_nbytes(device: torch.device) -> int:
    """Free device memory; on CPU what the machine has available, or less where a container's limit says so."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit = _read(CGROUP / "memory.max")
    used = _read(CGROUP / "memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _read(path: Path) -> int | None:
    """None: no such limit ("max"), or no cgroup to ask."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
