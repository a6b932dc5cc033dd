"""Of logits that rounding made equal, the one that was the largest is drawn."""

import pytest
import torch

from common.layers.ties import break_ties


def logits_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden.float() @ weight.float().T).to(torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_largest_before_rounding_wins_its_ties(scale: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(500, 64).to(torch.bfloat16)
    hidden = (torch.randn(300, 64) * 3).to(torch.bfloat16)
    exact = hidden.float() @ weight.float().T + 2000 * scale  # far from 0 few numbers are left, so many rows tie
    wide, one = torch.cat((weight, torch.full((500, 1), 2000 * scale).to(torch.bfloat16)), 1), torch.ones(300, 1, dtype=torch.bfloat16)
    logits = exact.to(torch.bfloat16)
    before = logits.clone()
    num_tied = ((before == before.max(-1, keepdim=True).values).sum(-1) > 1).sum()
    assert num_tied > 30
    break_ties(logits, torch.cat((hidden, one), 1), lambda ids: wide[ids])
    assert torch.equal(logits.float().argmax(-1), exact.argmax(-1))
    changed = logits != before
    assert changed.sum() == num_tied
    assert ((logits == logits.max(-1, keepdim=True).values).sum(-1) == 1).all()


def test_rows_without_a_meaningful_largest_stay_as_they_are() -> None:
    hidden, weight = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(20, 8, dtype=torch.bfloat16)
    logits = logits_of(hidden, weight)
    logits[0] = float("nan")
    logits[1, 3:5] = float("inf")
    logits[2] = float("-inf")
    before = logits.clone()
    break_ties(logits, hidden, lambda ids: weight[ids])
    assert torch.equal(logits[:3], before[:3]) or torch.equal(logits[:3].isnan(), before[:3].isnan())
    assert torch.equal(logits[1:3], before[1:3])
    assert logits[3, 0] > before[3, 0], "of equals before rounding, the first"
