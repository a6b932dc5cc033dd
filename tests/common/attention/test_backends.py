"""The torch backend against the dense oracle: what the others are compared with on a whole model must be right itself."""

from attention_batches import Case, Step, cases
from hypothesis import given, settings

from common.attention.torch import TorchAttention


@settings(max_examples=60, deadline=None)
@given(cases())
def test_torch_equals_the_oracle(case: Case) -> None:
    step = Step(case)
    step.check(TorchAttention(step.geometry, step.pool, step.rope))
