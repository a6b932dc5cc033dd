"""Links of either side: who is let in, who is lost and when, and what happens when the same process comes again."""

import logging
from typing import Any

import pytest
from transfer_sim import COMPAT, RecordingAcceptWire, RecordingDialWire, SimNetwork, frame, pages, registered_backend, settings

from common.errors import Failure
from kvtransfer.backend import PeerId, PeerUnknown
from kvtransfer.link import Address, DialFailed, PeerLost, PeerUp, RareWarning
from kvtransfer.link_accept import AcceptedLinks
from kvtransfer.link_dial import DialledLinks
from kvtransfer.memory import MemoryFabric
from kvtransfer.protocol import (
    Cancel,
    FirstToken,
    Heartbeat,
    Hello,
    HelloAck,
    HelloBody,
    Withdraw,
    hello,
    hello_ack,
    hello_refusal,
)
from kvtransfer.settings import TICK_S, TransferSettings

P, D = PeerId("p-process"), PeerId("d-process")
HOME = Address("p.example", 8998)
CANCEL = Cancel(room=1, attempt=1, sender=D, receiver=P, failure=Failure(499, "gone"))
TOKEN = FirstToken(room=1, attempt=1, sender=P, receiver=D, token_id=5, num_cached_tokens=0)


class Accepting:
    """P's links; the test plays the decode nodes."""

    def __init__(self, fence_delay_s: float = 0.0, **changes: Any) -> None:
        self.fabric = MemoryFabric(fence_delay_s=fence_delay_s)
        self.wire = RecordingAcceptWire()
        self.backend, _ = registered_backend(self.fabric)
        self.links = AcceptedLinks(settings(**changes), P, self.wire, self.backend)
        self.peer_backend, _ = registered_backend(self.fabric)

    def hello(self, peer: PeerId = D, live: tuple[str, ...] = (), page_nbytes: int | None = None, **compat: Any) -> Hello:
        body = HelloBody(settings(**compat).compat, self.peer_backend.describe(), 0.5, 3.0, live=list(live))
        return hello(peer, body)

    def receive(self, route: bytes, message: Any, now_s: float = 0.0) -> Any:
        return self.links.on_frame(route, frame(message), "10.0.0.9", now_s)

    def say_hello(self, route: bytes = b"r1", now_s: float = 0.0, **fields: Any) -> list[Any]:
        assert self.receive(route, self.hello(**fields), now_s) is None
        return self.wire.take(route)

    def lost(self) -> list[str]:
        lost = [news.peer for news in self.links.news if isinstance(news, PeerLost)]
        self.links.news.clear()
        return [str(peer) for peer in lost]

    def can_write(self, peer: PeerId = D) -> bool:
        try:
            self.backend.post("WRITE", peer, pages(), pages())
        except PeerUnknown:
            return False
        return True


def test_hello_is_acknowledged_and_the_peer_becomes_writable() -> None:
    p = Accepting()
    [ack] = p.say_hello()
    assert isinstance(ack, HelloAck)
    assert (ack.ok, ack.incarnation) == (True, P)
    assert p.can_write()
    assert p.links.snapshot() == [{"endpoint": "10.0.0.9/d-proces", "state": "up", "reason": ""}]


def test_room_messages_pass_after_hello_only() -> None:
    p = Accepting()
    assert p.receive(b"r1", CANCEL) is None
    [refusal] = p.wire.take(b"r1")
    assert (refusal.ok, refusal.reason) == (False, "no link: say Hello first")
    p.say_hello()
    assert p.receive(b"r1", CANCEL) == (D, CANCEL)


@pytest.mark.parametrize("forged", [{"sender": "other"}, {"receiver": "former-p"}])
def test_messages_that_name_other_processes_are_dropped(forged: dict[str, str]) -> None:
    p = Accepting()
    p.say_hello()
    fields = {"room": 1, "attempt": 1, "sender": D, "receiver": P, **forged}
    assert p.receive(b"r1", Cancel(**fields, failure=Failure(499, "gone"))) is None
    assert p.wire.take(b"r1") == []


def test_garbage_is_dropped_and_the_link_stays() -> None:
    p = Accepting()
    p.say_hello()
    assert p.links.on_frame(b"r1", b"\xff\x00garbage", None, 0.0) is None
    assert p.links.on_frame(b"r2", b"", None, 0.0) is None
    assert p.wire.sent == {}
    assert p.receive(b"r1", CANCEL) == (D, CANCEL)


def test_an_incompatible_hello_is_refused_with_both_values_and_leaves_nothing() -> None:
    p = Accepting()
    [refusal] = p.say_hello(page_size=32)
    assert not refusal.ok
    assert refusal.reason == "page size: 4 on the prefill node, 32 on the decode node"
    assert p.links.snapshot() == []
    assert not p.can_write()


def test_a_description_the_backend_does_not_take_is_refused() -> None:
    p = Accepting()
    body = HelloBody(COMPAT, b"of another backend", 0.5, 3.0)
    p.receive(b"r1", hello(D, body))
    [refusal] = p.wire.take(b"r1")
    assert not refusal.ok
    assert refusal.reason.startswith("KV transfer: the peer's description is not one")
    assert p.links.snapshot() == []


def test_more_peers_than_links_are_refused() -> None:
    p = Accepting(max_links=1)
    p.say_hello(b"r1")
    [refusal] = p.say_hello(b"r2", peer=PeerId("another"))
    assert not refusal.ok
    assert "serves 1 decode nodes already" in refusal.reason


def test_hello_again_on_its_own_connection_changes_nothing() -> None:
    p = Accepting()
    p.say_hello()
    [ack] = p.say_hello()
    assert ack.ok
    assert p.lost() == []


def test_a_peer_that_comes_back_by_another_connection_is_lost_first() -> None:
    p = Accepting()
    p.say_hello(b"r1")
    assert p.say_hello(b"r2", now_s=1.0) == []
    assert p.lost() == [D]
    p.links.tick(1.0)
    [ack] = p.wire.take(b"r2")
    assert ack.ok
    assert p.receive(b"r1", CANCEL, 1.0) is None
    assert p.receive(b"r2", CANCEL, 1.0) == (D, CANCEL)


def test_a_peer_that_comes_back_waits_for_the_fence_of_its_former_link() -> None:
    p = Accepting(fence_delay_s=2.0)
    p.say_hello(b"r1", now_s=10.0)
    assert p.say_hello(b"r2", now_s=11.0) == []
    assert p.links.snapshot()[0]["state"] == "fenced"
    assert not p.can_write()
    p.links.tick(12.9)
    assert p.wire.take(b"r2") == []
    p.links.tick(13.0)
    [ack] = p.wire.take(b"r2")
    assert ack.ok
    assert p.can_write()


def test_the_fence_of_a_lost_peer_is_forgotten_when_it_is_over() -> None:
    p = Accepting(fence_delay_s=2.0)
    p.say_hello(now_s=0.0)
    p.links.lose(D, "test", 1.0)
    p.links.tick(3.0)
    [ack] = p.say_hello(b"r2", now_s=3.0)
    assert ack.ok


def test_a_second_name_of_this_node_does_not_disturb_the_first_link() -> None:
    p = Accepting()
    p.say_hello(b"r1")
    [ack] = p.say_hello(b"r2", live=(P,))
    assert ack.ok
    assert p.lost() == []
    assert p.receive(b"r1", CANCEL) == (D, CANCEL)
    assert p.receive(b"r2", CANCEL) is None  # no link of its own


def test_a_connection_that_serves_another_process_ends_the_former_one() -> None:
    p = Accepting()
    p.say_hello(b"r1")
    [ack] = p.say_hello(b"r1", peer=PeerId("successor"))
    assert ack.ok
    assert p.lost() == [D]


def test_a_silent_peer_is_lost_after_the_timeout_and_not_before() -> None:
    p = Accepting(peer_timeout_s=3.0)
    p.say_hello(now_s=0.0)
    p.receive(b"r1", Heartbeat(D, P), 2.0)
    p.links.tick(4.9)
    assert p.lost() == []
    p.links.tick(5.0)
    assert p.lost() == [D]
    assert not p.can_write()
    assert p.links.next_due_s() == float("inf") or p.links.next_due_s() >= 5.0


def late_ticks(links: AcceptedLinks | DialledLinks, until_s: float) -> float | None:
    """Run the timers, each as late as timers may be; when the peer was lost."""
    while (due_s := links.next_due_s()) <= until_s:
        links.tick(due_s + TICK_S)
        if any(isinstance(news, PeerLost) for news in links.news):
            return due_s + TICK_S
    return None


@pytest.mark.parametrize("peer_timeout_s", [0.1, 1.0, 3.0])
def test_silence_is_noticed_within_the_peer_timeout_timers_and_all(peer_timeout_s: float) -> None:
    p, d = Accepting(peer_timeout_s=peer_timeout_s), Dialling(peer_timeout_s=peer_timeout_s)
    p.say_hello(now_s=0.0)
    link = d.up(now_s=0.0)
    heard_s = peer_timeout_s / 2
    p.receive(b"r1", Heartbeat(D, P), heard_s)
    d.links.on_frame(link, frame(Heartbeat(P, D, sent_s=8.0)), heard_s)
    for links in (p.links, d.links):
        lost_s = late_ticks(links, 10.0)
        assert lost_s is not None
        assert heard_s + 0.8 * peer_timeout_s < lost_s <= heard_s + peer_timeout_s + 1e-9


@pytest.mark.parametrize("peer_timeout_s", [0.1, 0.6, 3.0])
def test_six_heartbeats_go_into_a_peer_timeout_of_either_side(peer_timeout_s: float) -> None:
    p, d = Accepting(peer_timeout_s=peer_timeout_s), Dialling(peer_timeout_s=peer_timeout_s)
    p.say_hello(now_s=0.0)
    d.up(now_s=0.0)
    for node in (p, d):
        assert node.links.next_due_s() <= peer_timeout_s / 6
    asked = HelloBody(COMPAT, p.peer_backend.describe(), settings(peer_timeout_s=peer_timeout_s).beat_s, peer_timeout_s)
    patient = Accepting()
    patient.receive(b"r1", hello(D, asked))
    patient.wire.take(b"r1")
    assert patient.links.next_due_s() <= max(peer_timeout_s / 6, 0.01)


def test_p_may_post_while_what_it_said_is_echoed_in_time() -> None:
    p = Accepting()
    [ack] = p.say_hello(now_s=10.0)
    assert not p.links.may_post(D, 10.0)
    p.receive(b"r1", Heartbeat(D, P, echo_s=10.0), 10.1)
    assert p.links.may_post(D, 12.9)
    assert not p.links.may_post(D, 13.0)
    p.receive(b"r1", CANCEL, 12.9)  # heard of D, but nothing of what D heard
    assert not p.links.may_post(D, 13.0)
    p.links.tick(10.5)
    [beat] = p.wire.take(b"r1")
    p.receive(b"r1", Heartbeat(D, P, echo_s=beat.sent_s), 13.1)
    assert p.links.may_post(D, 13.1)
    p.links.lose(D, "test", 13.2)
    assert not p.links.may_post(D, 13.2)
    assert ack.ok


def test_a_withdrawal_passes_without_a_link() -> None:
    p = Accepting()
    said = Withdraw(room=1, sender="d-refused", receiver=P, failure=Failure(503, "no"))
    assert p.receive(b"r9", said) == ("d-refused", said)
    assert p.receive(b"r9", Withdraw(room=1, sender="d-refused", receiver="former-p", failure=Failure(503, "no"))) is None
    assert p.wire.take(b"r9") == []
    assert p.links.snapshot() == []


def test_heartbeats_go_out_while_a_link_exists_and_as_often_as_either_side_wants() -> None:
    p = Accepting(heartbeat_s=10.0)
    p.say_hello(now_s=0.0)
    assert p.links.next_due_s() == 0.5  # what D asked for
    p.links.tick(0.5)
    assert p.wire.take(b"r1") == [Heartbeat(P, D, sent_s=0.5)]
    assert p.links.next_due_s() == 1.0


def test_a_route_that_is_gone_is_found_by_a_probe() -> None:
    p = Accepting()
    p.say_hello(b"r1")
    p.say_hello(b"r2", peer=PeerId("other"))
    p.wire.gone.add(b"r1")
    p.links.probe(0.0)
    assert p.lost() == []  # not in the middle of a step
    assert p.links.next_due_s() < 0
    p.links.tick(1.0)
    assert p.lost() == [D]
    assert p.links.next_due_s() > 0


# ---- D -------------------------------------------------------------------------------------------------------------------------


class Dialling:
    """D's links; the test plays the prefill nodes."""

    def __init__(self, fence_delay_s: float = 0.0, **changes: Any) -> None:
        self.fabric = MemoryFabric(fence_delay_s=fence_delay_s)
        self.wire = RecordingDialWire()
        self.backend, _ = registered_backend(self.fabric)
        self.settings: TransferSettings = settings(**changes)
        self.links = DialledLinks(self.settings, D, self.wire, self.backend)
        self.peer_backend, _ = registered_backend(self.fabric)
        self.peer_backend.connect(D, self.backend.describe())

    def ack(self, link: int, peer: PeerId = P, now_s: float = 0.0, **compat: Any) -> None:
        body = HelloBody(settings(**compat).compat, self.peer_backend.describe(), 0.25, 3.0, sent_s=7.5)
        assert self.links.on_frame(link, frame(hello_ack(peer, body)), now_s) is None

    def up(self, address: Address = HOME, now_s: float = 0.0) -> int:
        """A new link, up; its number."""
        assert self.links.reach(address, now_s) is None
        link = len(self.wire.opened)
        self.ack(link, now_s=now_s)
        assert self.links.reach(address, now_s) == P
        self.links.news.clear()
        self.wire.take(link)
        return link

    def lets_in(self) -> bool:
        return self.backend.lets_in(self.peer_backend)

    def state(self, address: Address = HOME) -> str:
        return next(line["state"] for line in self.links.snapshot() if line["endpoint"] == str(address))


def test_the_first_offer_dials_and_says_hello() -> None:
    d = Dialling()
    assert d.links.reach(HOME, 0.0) is None
    assert d.links.reach(HOME, 0.0) is None
    assert d.wire.opened == [HOME]
    [said] = d.wire.take(1)
    assert isinstance(said, Hello)
    assert said.incarnation == D
    assert not d.lets_in()


def test_an_acknowledgement_opens_the_link() -> None:
    d = Dialling()
    d.links.reach(HOME, 0.0)
    d.ack(1)
    assert d.links.news == [PeerUp(HOME, P)]
    assert d.links.reach(HOME, 0.0) == P
    assert d.lets_in()
    d.links.send(P, CANCEL)
    assert d.wire.take(1)[1:] == [Heartbeat(D, P, echo_s=7.5), CANCEL]


def test_an_address_that_is_none_fails_at_once_and_opens_nothing() -> None:
    failure = Dialling().links.reach(Address("", 1), 0.0)
    assert isinstance(failure, Failure)
    assert (failure.status, failure.code) == (503, "peer_unreachable")


def test_a_refused_connection_fails_at_once_and_the_next_offer_dials_again() -> None:
    d = Dialling()
    d.links.reach(HOME, 0.0)
    d.links.on_disconnected(1, "connection refused", 0.1)
    [news] = d.links.news
    assert isinstance(news, DialFailed)
    assert (news.failure.status, news.failure.code) == (503, "peer_unreachable")
    assert news.failure.message == "prefill node p.example:8998 cannot be reached: connection refused"
    assert 1 in d.wire.closed
    assert d.links.reach(HOME, 0.2) is None
    assert d.wire.opened == [HOME, HOME]


def test_no_answer_to_hello_fails_after_the_peer_timeout() -> None:
    d = Dialling(peer_timeout_s=3.0)
    d.links.reach(HOME, 0.0)
    d.links.tick(2.9)
    assert d.links.news == []
    d.links.tick(3.0)
    [news] = d.links.news
    assert isinstance(news, DialFailed)
    assert "no answer to Hello within 3 s" in news.failure.message


def test_a_refusal_holds_for_a_while_and_then_hello_is_said_again() -> None:
    d = Dialling(refused_retry_s=5.0)
    d.links.reach(HOME, 0.0)
    d.links.on_frame(1, frame(hello_refusal(P, "page size: 16 here, 4 at the peer")), 1.0)
    [news] = d.links.news
    assert isinstance(news, DialFailed)
    assert (news.failure.status, news.failure.code) == (503, "incompatible_peer")
    assert "page size: 16 here, 4 at the peer" in news.failure.message
    assert d.links.snapshot() == [{"endpoint": "p.example:8998", "state": "refused", "reason": "page size: 16 here, 4 at the peer"}]
    assert d.links.reach(HOME, 5.9) == news.failure
    assert d.links.reach(HOME, 6.0) is None
    assert len(d.wire.opened) == 2


def test_an_acknowledgement_of_another_layout_is_a_refusal_too() -> None:
    d = Dialling()
    d.links.reach(HOME, 0.0)
    d.ack(1, context_length=4096)
    assert d.state() == "refused"
    assert not d.lets_in()


def test_a_description_the_backend_does_not_take_is_a_refusal_too() -> None:
    d = Dialling()
    d.links.reach(HOME, 0.0)
    d.links.on_frame(1, frame(hello_ack(P, HelloBody(COMPAT, b"nonsense", 0.5, 3.0))), 0.0)
    assert d.state() == "refused"
    assert "KV transfer: the peer" in d.links.snapshot()[0]["reason"]


def test_the_end_of_a_connection_loses_the_peer_and_bars_it() -> None:
    d = Dialling()
    link = d.up()
    d.links.on_disconnected(link, "its connection ended", 1.0)
    assert d.links.news == [PeerLost(P, "its connection ended")]
    assert not d.lets_in()
    assert d.state() == "down"


def test_a_restarted_node_behind_the_address_is_another_peer() -> None:
    d = Dialling()
    d.links.on_disconnected(d.up(), "its connection ended", 1.0)
    d.links.news.clear()
    d.links.reach(HOME, 2.0)
    d.ack(2, PeerId("p-restarted"), 2.0)
    assert d.links.news == [PeerUp(HOME, PeerId("p-restarted"))]
    d.links.send(P, CANCEL)  # the former process is passed over
    assert not any(isinstance(message, Cancel) for message in d.wire.take(2))


def test_a_silent_node_is_lost_after_the_timeout_and_not_before() -> None:
    d = Dialling(peer_timeout_s=3.0)
    link = d.up(now_s=0.0)
    d.links.on_frame(link, frame(Heartbeat(P, D)), 2.0)
    d.links.tick(4.9)
    assert d.links.news == []
    d.links.tick(5.0)
    assert d.links.news == [PeerLost(P, "nothing heard of it for 3 s")]


def test_d_sends_heartbeats_as_often_as_p_asks() -> None:
    d = Dialling()
    link = d.up(now_s=0.0)
    assert d.links.next_due_s() == 0.25
    d.links.tick(0.25)
    assert d.wire.take(link) == [Heartbeat(D, P, echo_s=7.5)]


def test_a_node_that_does_not_know_us_any_more_is_lost() -> None:
    d = Dialling()
    link = d.up()
    d.links.on_frame(link, frame(hello_refusal(P, "no link: say Hello first")), 1.0)
    assert d.links.news == [PeerLost(P, "it does not know this node any more")]
    assert d.links.reach(HOME, 1.0) is None  # dialled again at once: it is not incompatible


def test_room_messages_pass_from_the_right_process_only() -> None:
    d = Dialling()
    d.links.reach(HOME, 0.0)
    assert d.links.on_frame(1, frame(TOKEN), 0.0) is None  # before its HelloAck
    d.ack(1)
    assert d.links.on_frame(1, frame(TOKEN), 0.0) == (P, TOKEN)
    for forged in ({"sender": "former-p"}, {"receiver": "former-d"}):
        fields = {"room": 1, "attempt": 1, "sender": P, "receiver": D, **forged}
        assert d.links.on_frame(1, frame(FirstToken(**fields, token_id=5, num_cached_tokens=0)), 0.0) is None
    assert d.links.on_frame(1, b"garbage", 0.0) is None
    assert d.links.on_frame(99, frame(TOKEN), 0.0) is None
    assert d.state() == "up"


def test_a_second_name_of_a_node_uses_its_link_and_falls_with_it() -> None:
    d = Dialling()
    link = d.up()
    name = Address("alias", 8998)
    assert d.links.reach(name, 0.0) is None
    [said] = d.wire.take(2)
    assert d.links.news == []
    d.ack(2)
    assert d.links.news == [PeerUp(name, P)]
    assert 2 in d.wire.closed
    assert d.links.reach(name, 0.0) == P
    d.links.send(P, CANCEL)
    assert d.wire.take(link) == [CANCEL]
    d.links.on_disconnected(link, "gone", 1.0)
    assert d.state(name) == "down"
    assert d.links.reach(name, 1.0) is None
    assert isinstance(said, Hello)


def test_an_alias_whose_link_was_lost_meanwhile_is_dialled_again_at_once() -> None:
    d = Dialling()
    link = d.up()
    name = Address("alias", 8998)
    d.links.reach(name, 0.0)
    d.links.on_disconnected(link, "gone", 0.5)
    d.ack(2)
    assert [type(news) for news in d.links.news] == [PeerLost]
    assert (d.state(name), len(d.wire.opened)) == ("connecting", 3)
    d.ack(3)
    assert d.links.news[1:] == [PeerUp(name, P)]


def test_addresses_are_bounded_and_idle_ones_make_room() -> None:
    d = Dialling(max_links=1)
    link = d.up()
    failure = d.links.reach(Address("another", 1), 0.0)
    assert isinstance(failure, Failure)
    assert (failure.status, failure.code) == (503, "overloaded")
    d.links.on_disconnected(link, "gone", 1.0)
    assert d.links.reach(Address("another", 1), 1.0) is None
    assert [line["endpoint"] for line in d.links.snapshot()] == ["another:1"]


def test_a_send_that_fails_loses_the_peer_at_the_next_tick() -> None:
    d = Dialling()
    link = d.up()
    d.wire.gone.add(link)
    d.links.send(P, CANCEL)
    assert d.links.news == []
    assert d.links.next_due_s() < 0
    d.links.tick(0.0)
    assert d.links.news == [PeerLost(P, "its connection ended")]
    assert d.links.next_due_s() == float("inf")


def test_the_newest_that_was_heard_of_p_is_echoed() -> None:
    d = Dialling()
    link = d.up()
    for sent_s in (9.0, 8.5):  # the older one was late
        d.links.on_frame(link, frame(Heartbeat(P, D, sent_s=sent_s)), 0.1)
    d.links.tick(0.25)
    assert d.wire.take(link) == [Heartbeat(D, P, echo_s=9.0)]
    d.links.on_disconnected(link, "gone", 1.0)
    d.links.reach(HOME, 1.0)
    d.ack(2)
    assert d.wire.take(2)[1:] == [Heartbeat(D, P, echo_s=7.5)]  # of the new link's HelloAck


@pytest.mark.parametrize("fence_delay_s", [0.0, 2.0])
def test_a_fence_is_asked_when_the_lease_is_over_unless_the_backend_bars_p_itself(fence_delay_s: float) -> None:
    d = Dialling(fence_delay_s=fence_delay_s)
    link = d.up(now_s=0.0)
    d.links.on_frame(link, frame(Heartbeat(P, D, sent_s=8.0)), 4.0)
    d.links.on_disconnected(link, "gone", 5.0)
    [lost] = d.links.news
    assert isinstance(lost, PeerLost)
    assert lost.fence.delay_s == (pytest.approx(4.0 + d.settings.silent_s - 5.0 + 2.0) if fence_delay_s else 0.0)


def test_a_refused_node_is_told_of_withdrawn_rooms_until_the_next_hello() -> None:
    d = Dialling(refused_retry_s=5.0)
    no = Failure(503, "no")
    assert not d.links.withdraw(HOME, 1, no)
    d.links.reach(HOME, 0.0)
    assert not d.links.withdraw(HOME, 1, no)
    assert d.links.is_dialling(HOME)
    d.links.on_frame(1, frame(hello_refusal(P, "page size")), 1.0)
    assert d.links.withdraw(HOME, 1, no)
    assert d.wire.take(1)[1:] == [Withdraw(room=1, sender=D, receiver=P, failure=no)]
    d.links.on_frame(1, frame(TOKEN), 2.0)
    assert d.state() == "refused"
    d.links.tick(6.0)
    assert 1 in d.wire.closed
    assert not d.links.withdraw(HOME, 2, no)
    assert d.links.reach(HOME, 6.0) is None


def test_a_refused_node_that_ends_is_dialled_by_the_next_offer() -> None:
    d = Dialling(refused_retry_s=1000.0)
    d.links.reach(HOME, 0.0)
    d.links.on_frame(1, frame(hello_refusal(P, "page size")), 0.0)
    d.links.news.clear()
    d.links.on_disconnected(1, "its connection ended", 1.0)
    assert (d.links.news, d.state()) == ([], "down")
    assert d.links.reach(HOME, 1.0) is None
    d.ack(2)
    assert d.links.reach(HOME, 1.0) == P


def test_a_withdrawal_goes_by_the_link_of_the_process_whatever_its_name() -> None:
    d = Dialling()
    link = d.up()
    name = Address("alias", 8998)
    d.links.reach(name, 0.0)
    d.ack(2)
    for address in (HOME, name):
        assert d.links.withdraw(address, 1, Failure(503, "no"))
    assert [type(message) for message in d.wire.take(link)] == [Withdraw, Withdraw]
    d.wire.gone.add(link)
    d.links.withdraw(HOME, 1, Failure(503, "no"))
    d.links.tick(1.0)
    assert isinstance(d.links.news[-1], PeerLost)


# ---- both ----------------------------------------------------------------------------------------------------------------------


def test_a_node_that_was_stopped_and_goes_on_is_met_again() -> None:
    """P stands still for longer than the timeout; D gives the link up, and its next offer finds the same process."""
    network = SimNetwork()
    p, d = network.prefill(1), network.decode()
    d.log.open(1)
    d.session.offer(1, Address("p", 1), 4, b"x", 0, pages(1), network.now_s + 60, network.unix_s + 60, network.now_s)
    network.pump()
    assert d.session.links.snapshot()[0]["state"] == "up"
    network.now_s += 10.0
    d.step()  # lost
    d.step()  # and fenced
    assert d.log.is_over(1)
    d.log.open(2)
    d.session.offer(2, Address("p", 1), 4, b"x", 0, pages(1), network.now_s + 60, network.unix_s + 60, network.now_s)
    network.pump()
    assert d.session.links.snapshot()[0]["state"] == "up"
    assert p.session.stats()["transfer_rooms_parked"] == 1


def test_an_idle_link_stays_up_for_hours() -> None:
    network = SimNetwork()
    p, d = network.prefill(1), network.decode()
    d.log.open(1)
    d.session.offer(1, p.address, 4, b"x", 0, pages(1), network.now_s + 1, network.unix_s + 1, network.now_s)
    for _ in range(2 * 3600):
        network.pump()
        network.advance(0.5)
    assert d.log.is_over(1)
    assert [line["state"] for process in (p, d) for line in process.session.links.snapshot()] == ["up", "up"]


def test_addresses_print_as_urls_have_them() -> None:
    assert str(Address("10.0.0.1", 80)) == "10.0.0.1:80"
    assert str(Address("fe80::1", 80)) == "[fe80::1]:80"


def test_a_warning_anybody_can_provoke_is_rare_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    warn = RareWarning(logging.getLogger("test"))
    for now_s in (0.0, 1.0, 2.0, 6.0):
        warn(now_s, f"at {now_s:g}")
    assert [record.getMessage() for record in caplog.records] == ["at 0", "at 6 (2 more like it)"]
