"""Where float8 can be multiplied on this CPU as it is on a GPU: torch 2.13 scales by row here, 2.11 by tensor only."""

import pytest
import torch


def _scales_by_row() -> bool:
    p = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(p, p.T, scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


multiplies_float8 = pytest.mark.skipif(not _scales_by_row(), reason=f"torch {torch.__version__} multiplies float8 with scales by row on CUDA only")
