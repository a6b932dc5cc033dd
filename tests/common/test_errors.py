"""Failures as OpenAI clients see them, and as they travel."""

import msgspec
import pytest

from common.errors import Failure, PdserveError, RequestError, StartupError, deadline_exceeded, invalid, not_found, overloaded, too_large, unavailable


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"), (413, "invalid_request_error"),
        (422, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error"), (503, "server_error"), (504, "server_error"),
    ],
)  # fmt: skip
def test_openai_type_of_a_status(status: int, kind: str) -> None:
    assert Failure(status, "m").type == kind


def test_openai_body_has_exactly_the_four_keys() -> None:
    body = Failure(400, "too hot", code="bad", param="temperature", stage="intake", retry_after_s=2).openai_body()
    assert body == {"error": {"message": "too hot", "type": "invalid_request_error", "param": "temperature", "code": "bad"}}


@pytest.mark.parametrize(
    ("error", "status", "retryable"),
    [
        (invalid("m", param="stop"), 400, False),
        (not_found("m"), 404, False),
        (too_large("m"), 413, False),
        (overloaded("m", stage="queue"), 503, True),
        (unavailable("m", stage="transfer"), 503, False),
    ],
)
def test_each_constructor_decides_its_status_and_keeps_the_message(error: RequestError, status: int, retryable: bool) -> None:
    assert isinstance(error, PdserveError)
    assert (error.failure.status, error.failure.message, str(error)) == (status, "m", "m")
    assert (error.failure.retry_after_s is not None) == retryable
    assert error.failure.stage is not None


def test_deadline_names_the_stage() -> None:
    failure = deadline_exceeded("transfer")
    assert (failure.status, failure.code, failure.stage) == (504, "deadline_exceeded", "transfer")
    assert "transfer" in failure.message


def test_failure_travels_unchanged() -> None:
    failure = Failure(503, "gone", code="peer_lost", stage="transfer", retry_after_s=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure) == failure


def test_startup_error_is_no_request_error() -> None:
    assert not issubclass(StartupError, RequestError)
