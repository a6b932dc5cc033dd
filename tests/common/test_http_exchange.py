"""One reply an exchange: its true status before the first byte, an in-band error event after it."""

import json
from typing import Any

import pytest

from common.errors import Failure, RequestError
from common.http_exchange import ABORT_EXTENSION, MAX_BODIES_BYTES, BodyBudget, ClientLeft, Exchange, Message, request_id_of

FAILURE = Failure(504, "too late", code="deadline_exceeded")
ERROR = {"error": {"message": "too late", "type": "server_error", "param": None, "code": "deadline_exceeded"}}


class Client:
    """Sends the given messages, keeps what it is sent."""

    def __init__(self, *messages: Message, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []
        scope: dict[str, Any] = {"headers": list(headers), "path": "/", "extensions": {ABORT_EXTENSION: {"call": lambda: None}}}
        self.exchange = Exchange(scope, self.receive, self.send, "id")

    async def receive(self) -> Message:
        return self.messages.pop(0) if self.messages else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(dict(message))


def part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_an_early_failure_has_its_status_and_retry_after() -> None:
    client = Client(part(b"{}"))
    await client.exchange.body(100, BodyBudget(100))
    await client.exchange.fail(Failure(503, "full", code="overloaded", retry_after_s=0.2))
    head, body = client.sent
    assert head["status"] == 503
    assert (b"retry-after", b"1") in head["headers"]
    assert json.loads(body["body"])["error"]["code"] == "overloaded"
    assert not body["more_body"]


async def test_a_failure_in_a_stream_is_a_plain_data_event_then_done() -> None:
    client = Client(part(b"{}"))
    await client.exchange.body(100, BodyBudget(100))
    await client.exchange.start(200, [])
    await client.exchange.fail(FAILURE)
    event, done, rest = client.sent[1]["body"].split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == ERROR
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    declared = Client(part(b"x" * 9), headers=((b"content-length", b"9"),))
    chunked = Client(part(b"x" * 5, more=True), part(b"x" * 5, more=True))
    for client in (declared, chunked):
        with pytest.raises(RequestError) as refused:
            await client.exchange.body(8, BodyBudget(8))
        assert refused.value.failure.status == 413
    await declared.exchange.fail(refused.value.failure)
    assert (b"connection", b"close") in declared.sent[0]["headers"]


async def test_a_client_that_leaves_in_its_body_is_noticed() -> None:
    with pytest.raises(ClientLeft):
        await Client(part(b"x", more=True)).exchange.body(8, BodyBudget(8))


async def test_bodies_are_bounded_together() -> None:
    """What one gives back, another may take; a refused body takes nothing."""
    budget = BodyBudget(8)
    half = b"x" * (MAX_BODIES_BYTES // 2)
    first, second, third = (Client(part(half)) for _ in range(3))
    for client in (first, second):
        await client.exchange.body(len(half), budget)
    with pytest.raises(RequestError) as refused:
        await third.exchange.body(len(half), budget)
    third.exchange.release_body()
    assert refused.value.failure.status == 503
    assert refused.value.failure.retry_after_s is not None
    for _ in range(2):
        first.exchange.release_body()
    assert budget.num_bytes == len(half)
    await Client(part(half)).exchange.body(len(half), budget)


@pytest.mark.parametrize(("value", "status"), [(b"nan", 400), (b"soon", 400), (b"1.0", 504)])
def test_a_deadline_that_cannot_be_kept_is_refused(value: bytes, status: int) -> None:
    with pytest.raises(RequestError) as refused:
        Client(headers=((b"x-request-deadline", value),)).exchange.deadline_s(60.0)
    assert refused.value.failure.status == status


def test_request_ids_are_taken_when_harmless_and_minted_otherwise() -> None:
    assert request_id_of([(b"x-request-id", b"abc-1")]) == "abc-1"
    assert request_id_of([(b"x-request-id", b"a b\n")]) != "a b\n"
    assert len(request_id_of([])) == 16
