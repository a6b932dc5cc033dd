"""The device's owner: weights, KV pool, attention backend, sampler.  (contract; to be implemented)"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.engine.batch import DecodeBatch, ExtendBatch


class Runner(Protocol):
    def extend(self, batch: ExtendBatch) -> NDArray[np.int64]:
        """Write the batch's KV and sample. Returns token ids [S]."""

    def decode(self, batch: DecodeBatch) -> NDArray[np.int64]:
        """Write the batch's KV and sample. Returns token ids [B]."""
