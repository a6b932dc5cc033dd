"""The seam between scheduler and engine: a step is launched; has it run, and which tokens did it draw?"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import Batch


class Ready(Protocol):
    def query(self) -> bool:
        """True once the KV of the step, and of those before it, is in the pool. Never blocks; any thread may ask."""


class Launched(Protocol):
    @property
    def ready(self) -> Ready | None:
        """None: the step has run."""

    def done(self) -> bool:
        """Would tokens() return at once? Never blocks."""

    def tokens(self) -> NDArray[np.int64]:
        """Token ids [S], one for each row that samples, NON_FINITE for one whose logits are not finite. Waits for the step."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that had run when its launch returned."""

    drawn: NDArray[np.int64]
    ready: None = None

    def done(self) -> bool:
        return True

    def tokens(self) -> NDArray[np.int64]:
        return self.drawn


class Runner(Protocol):
    def launch(self, batch: Batch) -> Launched:
        """Have the device write the batch's KV and draw its tokens, after all launched before; may return before it has."""
