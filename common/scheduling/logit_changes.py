"""What a request's parameters do to its logits before it samples: its history is made when that is first asked."""

from collections.abc import Collection

from common.engine.batch import LogitChange
from common.sampling.penalties import LogitHistory
from common.scheduling.request import Request


class LogitChangesOf:
    def __init__(self, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size

    def of(self, request: Request, row: int, num_outputs: int) -> LogitChange:
        """row: among the rows of the batch that sample. num_outputs: drawn before this draw, those under way included."""
        if request.history is None:
            request.history = LogitHistory(request.sampling, request.prompt_ids, self._eos_token_ids, self._vocab_size)
        return LogitChange(row, request.history, request.output_ids, num_outputs)
