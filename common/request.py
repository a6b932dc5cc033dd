"""What a request asks for, as it travels between processes: sampling parameters, text handling, where its prefill runs.

Torch-free. The scheduler's own mutable record of a request is common/scheduling/request.py.
"""

import msgspec

GREEDY_TEMPERATURE = 1e-5  # below this the argmax is taken: dividing logits by less only loses precision


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is drawn and when generation ends. Values are validated at intake (common/server)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    seed: int = 0  # always set: intake draws one when the client sent none; token i is drawn from (seed, i)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # what these do to a logit: common/sampling/penalties.py
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit); no id twice
    min_tokens: int = 0  # outputs before a token that ends the request may come

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """The token drawn last must be known before the next can be drawn."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        return self.needs_history or bool(self.logit_bias) or self.min_tokens > 0


class TextSpec(msgspec.Struct, frozen=True):
    """How token ids become the client's text. Opaque to the scheduler: it hands it on with the first output of a request."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class Bootstrap(msgspec.Struct, frozen=True):
    """Names the pair: P's control endpoint, and the 63-bit room both nodes know this request by."""

    host: str
    port: int
    room: int
