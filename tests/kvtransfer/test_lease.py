"""Until when P may write: only what D says it heard counts, on P's own clock."""

import pytest

from kvtransfer.lease import Lease

TIMEOUT_S = 3.0


def lease_with(*sent_s: float) -> Lease:
    lease = Lease(TIMEOUT_S)
    for one in sent_s:
        lease.sent(one)
    return lease


def test_nothing_may_be_posted_before_the_first_echo() -> None:
    assert not lease_with(10.0).holds(10.0)


def test_a_lease_ends_a_timeout_after_the_echoed_message_was_sent() -> None:
    lease = lease_with(10.0)
    lease.echoed(10.0)
    assert lease.holds(12.999)
    assert not lease.holds(13.0)


def test_an_old_echo_renews_nothing_and_shortens_nothing() -> None:
    lease = lease_with(10.0, 11.0)
    lease.echoed(11.0)
    lease.echoed(10.0)
    assert lease.holds(13.9)
    assert not lease.holds(14.0)


@pytest.mark.parametrize("echo_s", [10.1, 1e9, float("inf"), float("nan")])
def test_an_echo_of_what_was_never_sent_is_none(echo_s: float) -> None:
    lease = lease_with(10.0)
    lease.echoed(echo_s)
    assert not lease.holds(10.0)
