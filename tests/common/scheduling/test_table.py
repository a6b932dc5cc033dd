"""The table of unanswered requests: each times out once, and an answered one is let go at once."""

import gc
import time
import weakref

import pytest

from common.messages import Generate
from common.request import SamplingParams, TextSpec
from common.scheduling.request import Place, Request
from common.scheduling.table import RequestTable


class WeakRequest(Request):
    """Request has slots and no room for weak references."""

    __slots__ = ("__weakref__",)


def generate(rid: str, timeout_s: float) -> Generate:
    return Generate(rid, [1, 2], SamplingParams(max_new_tokens=3), TextSpec(), time.time() + timeout_s)


def test_a_request_expires_once_with_504() -> None:
    now_s = time.monotonic()
    table = RequestTable(lambda: now_s)
    late = table.open(generate("late", 1.0))
    table.open(generate("fine", 100.0))
    assert table.expired() == []
    assert 0.5 < table.next_timer_in_s() < 1.1
    now_s += 1.5
    [(request, failure)] = table.expired()
    assert request is late
    assert failure.status == 504
    assert table.expired() == []


def test_an_answered_request_never_expires() -> None:
    now_s = time.monotonic()
    table = RequestTable(lambda: now_s)
    over, aborted, answered = (table.open(generate(rid, 1.0)) for rid in ("over", "aborted", "answered"))
    over.place = Place.OVER
    assert table.take("aborted") is aborted
    table.forget([answered])
    now_s += 2.0
    assert table.expired() == []


def test_answered_requests_are_let_go_though_an_older_one_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.scheduling.request.Request", WeakRequest)
    table = RequestTable()
    table.open(generate("old", 50.0))
    answered = weakref.ref(table.open(generate("new", 100.0)))
    table.forget([request for request in (answered(),) if request is not None])
    gc.collect()
    assert answered() is None
    assert len(table) == 1


def test_drain_shortens_every_deadline_and_ends_when_empty() -> None:
    now_s = time.monotonic()
    table = RequestTable(lambda: now_s)
    request = table.open(generate("r", 100.0))
    table.drain(time.time() + 1.0)
    assert not table.drained
    now_s += 1.5
    [(expired, failure)] = table.expired()
    assert (expired, failure.status, failure.code) == (request, 503, "shutting_down")
    table.forget([request])
    assert table.drained
