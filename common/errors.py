"""What can go wrong, as types.

    PdserveError
    ├── StartupError        a process cannot start; the CLI prints the sentence and exits 2
    └── RequestError        one request cannot be served; carries a Failure (status, message, stage)

`Failure` is the form in which an error travels between processes and nodes: the first root cause is kept and reaches the
client (R6). Constructors below name the cases so that statuses are decided in one place.
"""

import msgspec


class Failure(msgspec.Struct, frozen=True):
    """Why a request ended without an answer. `status` is the HTTP status a client gets before its first byte."""

    status: int
    message: str
    code: str | None = None  # machine readable, e.g. "context_length_exceeded", "peer_lost"
    param: str | None = None  # the request field at fault, if one is
    stage: str | None = None  # where: "intake", "queue", "prefill", "transfer", "decode", "router"
    retry_after_s: float | None = None

    @property
    def type(self) -> str:
        """OpenAI error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 401:
            return "authentication_error"
        if self.status == 404:
            return "not_found_error"
        return "invalid_request_error" if 400 <= self.status < 500 else "server_error"

    def openai_body(self) -> dict[str, object]:
        """The OpenAI error object: {"error": {message, type, param, code}}."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class PdserveError(Exception):
    """Base of every error raised on purpose."""


class StartupError(PdserveError):
    """A process cannot start: bad flag, unreadable model, port in use. One sentence, exit code 2, no traceback."""


class RequestError(PdserveError):
    """One request cannot be served."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(message: str, *, param: str | None = None, code: str | None = None, stage: str = "intake") -> RequestError:
    """400: the request itself is wrong; never retried."""
    return RequestError(Failure(400, message, code=code, param=param, stage=stage))


def not_found(message: str, *, param: str | None = None, code: str | None = None) -> RequestError:
    """404: unknown path or model."""
    return RequestError(Failure(404, message, code=code, param=param, stage="intake"))


def too_large(message: str) -> RequestError:
    """413: the body is larger than the limit."""
    return RequestError(Failure(413, message, code="request_too_large", stage="intake"))


def overloaded(message: str, *, stage: str, retry_after_s: float = 1.0) -> RequestError:
    """503 with Retry-After: a bounded queue or table is full (R7)."""
    return RequestError(Failure(503, message, code="overloaded", stage=stage, retry_after_s=retry_after_s))


def unavailable(message: str, *, stage: str, code: str = "unavailable") -> RequestError:
    """503: a node or peer needed for this request is gone or refuses; another pair may serve it."""
    return RequestError(Failure(503, message, code=code, stage=stage))


def deadline_exceeded(stage: str) -> Failure:
    """504: the request's absolute deadline passed."""
    return Failure(504, f"the request's deadline passed during {stage}", code="deadline_exceeded", stage=stage)
