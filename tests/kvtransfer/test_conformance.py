"""The contract of kvtransfer/backend.py, held against every backend in transfer_harness.HARNESSES."""

import itertools
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import psutil
import pytest
from transfer_harness import HARNESSES, Harness, Node, Victim, digest

from kvtransfer.backend import Op, PeerId, PeerUnknown, Ticket, TransferError

PAGE_NBYTES = 192
NUM_PAGES = 64
OPS: tuple[Op, ...] = ("WRITE", "READ")


class World:
    """Makes nodes and victims of one backend, and closes them."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.nodes: list[Node] = []
        self.victims: list[Victim] = []

    def node(self, num_pages: int = NUM_PAGES, page_nbytes: int = PAGE_NBYTES) -> Node:
        self.nodes.append(Node(f"node-{len(self.nodes)}", self._harness.backend(), num_pages, page_nbytes))
        return self.nodes[-1]

    def pair(self, num_pages: int = NUM_PAGES, page_nbytes: int = PAGE_NBYTES) -> tuple[Node, Node]:
        """Two nodes that know each other, with different contents."""
        here, there = self.node(num_pages, page_nbytes), self.node(num_pages, page_nbytes)
        here.fill(1)
        there.fill(2)
        here.meet(there)
        there.meet(here)
        return here, there

    def victim(self, here: Node) -> Victim:
        """A killable node with a pool like `here`'s, joined with it."""
        self.victims.append(self._harness.victim(f"victim-{len(self.victims)}", *here.pool.shape))
        self.join(here, self.victims[-1])
        return self.victims[-1]

    def restarted(self, victim: Victim) -> Victim:
        self.victims.append(victim.restarted(f"victim-{len(self.victims)}"))
        return self.victims[-1]

    @staticmethod
    def join(here: Node, victim: Victim) -> None:
        here.meet(victim)
        victim.meet(here)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        for victim in self.victims:
            victim.stop()


@pytest.fixture(params=sorted(HARNESSES))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(HARNESSES[request.param]())
    yield made
    made.close()


# ---- bytes -------------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[np.random.Generator], tuple[list[int], list[int]]]] = {
    "one page": lambda rng: ([3], [5]),
    "contiguous": lambda rng: ([*range(8, 40)], [*range(20, 52)]),
    "whole region": lambda rng: ([*range(NUM_PAGES)], [*range(NUM_PAGES)]),
    "scattered source": lambda rng: (rng.permutation(NUM_PAGES)[:20].tolist(), [*range(30, 50)]),
    "scattered destination": lambda rng: ([*range(30, 50)], rng.permutation(NUM_PAGES)[:20].tolist()),
    "permuted": lambda rng: (rng.permutation(NUM_PAGES).tolist(), rng.permutation(NUM_PAGES).tolist()),
    "descending": lambda rng: ([*range(40, 10, -1)], [*range(10, 40)]),
    "runs and holes": lambda rng: ([0, 1, 2, 10, 11, 62, 63], [63, 0, 1, 2, 30, 31, 40]),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exactly_the_named_pages_move(world: World, op: Op, layout: str) -> None:
    here, there = world.pair()
    local, remote = LAYOUTS[layout](np.random.default_rng(7))
    expected_here, expected_there = here.pool.copy(), there.pool.copy()
    if op == "WRITE":
        expected_there[remote] = here.pool[local]
    else:
        expected_here[local] = there.pool[remote]
    assert here.wait(here.post(op, there.peer, local, remote)) == [None]
    assert digest(there.pool) == digest(expected_there)
    assert digest(here.pool) == digest(expected_here)


@pytest.mark.parametrize("op", OPS)
def test_no_pages_complete_at_once(world: World, op: Op) -> None:
    here, there = world.pair()
    ticket = here.post(op, there.peer, [], [])
    assert [completion.ticket for completion in here.backend.poll()] == [ticket]


@pytest.mark.parametrize("op", OPS)
def test_thousands_of_scattered_pages_in_one_post(world: World, op: Op) -> None:
    num_pages = 20_000
    here, there = world.pair(num_pages, 64)
    rng = np.random.default_rng(3)
    local, remote = rng.permutation(num_pages), rng.permutation(num_pages)
    source = (here if op == "WRITE" else there).pool.copy()
    assert here.wait(here.post(op, there.peer, local, remote)) == [None]
    if op == "WRITE":
        assert digest(there.pool[remote]) == digest(source[local])
    else:
        assert digest(here.pool[local]) == digest(source[remote])


def test_pages_larger_than_any_socket_buffer(world: World) -> None:
    here, there = world.pair(4, 5_000_011)
    tickets = [here.post("WRITE", there.peer, [0, 3], [2, 1]), here.post("READ", there.peer, [1], [3])]
    assert here.wait(*tickets) == [None, None]
    assert digest(there.pool[[2, 1]]) == digest(here.pool[[0, 3]])
    assert digest(here.pool[1]) == digest(there.pool[3])


def test_many_tickets_in_flight_complete_once_each(world: World) -> None:
    here, there = world.pair()
    source = here.pool.copy()
    order = np.random.default_rng(5).permutation(NUM_PAGES)
    tickets = [here.post("WRITE", there.peer, [int(page)], [page_position]) for page_position, page in enumerate(order)]
    tickets += [here.post("WRITE", there.peer, [int(page)], [page_position]) for page_position, page in enumerate(order)]
    assert len(set(tickets)) == 2 * NUM_PAGES
    assert here.wait(*tickets) == [None] * len(tickets)
    here.collect()
    assert set(here.completed) == set(tickets)
    assert digest(there.pool) == digest(source[order])


def test_completed_writes_are_visible(world: World) -> None:
    here, there = world.pair()
    for round_number in range(100):
        here.pool[:] = round_number
        assert here.wait(here.post("WRITE", there.peer, range(NUM_PAGES), range(NUM_PAGES))) == [None]
        assert (there.pool == round_number).all()


def test_every_sender_reaches_every_receiver_at_once(world: World) -> None:
    senders, receivers = [world.node() for _ in range(3)], [world.node() for _ in range(2)]
    pages_each = NUM_PAGES // len(senders)
    for number, sender in enumerate(senders):
        sender.fill(number)
    for sender, receiver in itertools.product(senders, receivers):
        sender.meet(receiver)
        receiver.meet(sender)
    slots = [range(number * pages_each, (number + 1) * pages_each) for number in range(len(senders))]
    tickets = [
        (sender, sender.post("WRITE", receiver.peer, [page], [page]))
        for sender, slot in zip(senders, slots, strict=True)
        for page in slot
        for receiver in receivers
    ]
    assert [sender.wait(ticket) for sender, ticket in tickets] == [[None]] * len(tickets)
    for receiver, (sender, slot) in itertools.product(receivers, zip(senders, slots, strict=True)):
        assert digest(receiver.pool[slot]) == digest(sender.pool[slot])


def test_both_sides_write_and_read_at_once(world: World) -> None:
    here, there = world.pair(8, 1 << 20)
    sources = here.pool.copy(), there.pool.copy()
    mine = [here.post("WRITE", there.peer, [0, 1], [4, 5]), here.post("READ", there.peer, [6, 7], [2, 3])]
    theirs = [there.post("WRITE", here.peer, [0, 1], [4, 5]), there.post("READ", here.peer, [6, 7], [2, 3])]
    assert here.wait(*mine) + there.wait(*theirs) == [None] * 4
    for node, source in ((here, sources[1]), (there, sources[0])):
        assert digest(node.pool[4:6]) == digest(source[0:2])
        assert digest(node.pool[6:8]) == digest(source[2:4])


def test_completion_fd_is_readable_while_completions_wait(world: World) -> None:
    here, there = world.pair()
    fd = here.backend.completion_fd()
    assert select.select([fd], [], [], 0)[0] == []
    tickets = [here.post("WRITE", there.peer, [page], [page]) for page in range(10)]
    here.wait(*tickets)
    assert select.select([fd], [], [], 0)[0] == []
    here.post("WRITE", there.peer, [], [])
    assert select.select([fd], [], [], 0)[0] == [fd]


# ---- bad calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "remote", "sentence"),
    [
        (np.array([0, NUM_PAGES], np.int32), np.array([0, 1], np.int32), f"local page {NUM_PAGES} is outside"),
        (np.array([-1], np.int32), np.array([0], np.int32), "local page -1 is outside"),
        (np.array([0, 1], np.int32), np.array([0], np.int32), "2 local pages for 1 remote pages"),
        (np.array([0], np.int64), np.array([0], np.int32), r"local pages are int64\[1\]"),
        (np.array([0], np.int32), np.array([[0]], np.int32), r"remote pages are int32\[1, 1\]"),
    ],
)
def test_bad_local_arguments_raise_and_post_nothing(world: World, local: np.ndarray, remote: np.ndarray, sentence: str) -> None:
    here, there = world.pair()
    before = digest(there.pool)
    with pytest.raises(ValueError, match=sentence):
        here.backend.post("WRITE", there.peer, local, remote)
    assert here.backend.poll() == []
    assert digest(there.pool) == before


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**31 - 1])
def test_a_remote_page_that_does_not_exist_fails_its_ticket_alone(world: World, op: Op, page: int) -> None:
    here, there = world.pair()
    before = digest(here.pool), digest(there.pool)
    (error,) = here.wait(here.post(op, there.peer, [0, 1], [0, page]))
    assert f"page {page}" in str(error)
    assert (digest(here.pool), digest(there.pool)) == before
    assert here.wait(here.post(op, there.peer, [0, 1], [0, 1])) == [None]


def test_peers_nobody_connected_are_unknown(world: World) -> None:
    here, there = world.pair()
    with pytest.raises(PeerUnknown):
        here.post("WRITE", PeerId("nobody"), [0], [0])
    here.backend.disconnect(PeerId("nobody"))
    here.backend.disconnect(there.peer)
    with pytest.raises(PeerUnknown):
        here.post("WRITE", there.peer, [0], [0])
    assert here.backend.poll() == []


def test_connect_and_accept_are_idempotent_and_refuse_another_description(world: World) -> None:
    here, there = world.pair()
    third = world.node()
    here.meet(there)
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
    for method in (here.backend.connect, here.backend.accept):
        with pytest.raises(TransferError, match="another description"):
            method(there.peer, third.description)
        with pytest.raises(TransferError, match="description is not one of"):
            method(PeerId("x"), b'{"backend": "carrier pigeon"}')
        with pytest.raises(TransferError, match="description is not one of"):
            method(PeerId("x"), b"\xff\x00")
    assert len(here.description) <= 4096


def test_another_page_size_is_refused(world: World) -> None:
    here, other = world.node(), world.node(page_nbytes=2 * PAGE_NBYTES)
    for method in (here.backend.connect, here.backend.accept):
        with pytest.raises(TransferError, match=f"{2 * PAGE_NBYTES} bytes, ours {PAGE_NBYTES}"):
            method(other.peer, other.description)


@pytest.mark.parametrize("op", OPS)
def test_only_accepted_peers_reach_a_region(world: World, op: Op) -> None:
    here, there = world.node(), world.node()
    here.fill(1)
    there.fill(2)
    before = digest(here.pool), digest(there.pool)
    here.meet(there)
    (error,) = here.wait(here.post(op, there.peer, [0], [0]))
    assert error is not None
    assert (digest(here.pool), digest(there.pool)) == before
    there.meet(here)
    assert here.wait(here.post(op, there.peer, [0], [0])) == [None]


# ---- ends --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_disconnect_completes_every_ticket_and_leaves_others_alone(world: World, op: Op) -> None:
    here, there = world.pair(16, 1 << 20)
    other = world.node(16, 1 << 20)
    here.meet(other)
    other.meet(here)
    tickets = [here.post(op, there.peer, range(16), range(16)) for _ in range(8)]
    kept = here.post("WRITE", other.peer, range(16), range(16))
    here.backend.disconnect(there.peer)
    here.collect()
    assert set(tickets) <= set(here.completed), "disconnect() returned with tickets outstanding"
    mine = digest(here.pool)
    assert here.wait(kept) == [None]
    assert digest(here.pool) == mine
    assert digest(other.pool) == mine


def test_nothing_lands_after_the_receivers_disconnect(world: World) -> None:
    here, there = world.pair(16, 1 << 20)
    tickets = [here.post("WRITE", there.peer, range(16), np.roll(np.arange(16), shift)) for shift in range(8)]
    there.part(here.peer)
    frozen = digest(there.pool)
    errors = here.wait(*tickets)
    assert digest(there.pool) == frozen
    assert errors == sorted(errors, key=lambda error: error is not None), "writes of one connection end in order"
    assert here.wait(here.post("WRITE", there.peer, [0], [0])) != [None]


def test_peers_that_parted_can_meet_again(world: World) -> None:
    here, there = world.pair()
    for shift in range(3):
        assert here.wait(here.post("WRITE", there.peer, [shift], [shift])) == [None]
        here.backend.disconnect(there.peer)
        there.backend.disconnect(here.peer)
        here.meet(there)
        there.meet(here)
    assert here.wait(here.post("WRITE", there.peer, range(NUM_PAGES), range(NUM_PAGES))) == [None]
    assert digest(there.pool) == digest(here.pool)


@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_close_in_flight_completes_every_ticket_once(world: World, closer: str) -> None:
    here, there = world.pair(16, 1 << 20)
    tickets = [here.post(op, there.peer, range(16), range(16)) for op in ("WRITE", "READ", "WRITE", "READ")]
    closing = here if closer == "sender" else there
    closing.backend.close()
    closing.backend.close()
    if closing is here:
        here.collect()
        assert set(here.completed) == set(tickets)
        with pytest.raises(PeerUnknown):
            here.post("WRITE", there.peer, [0], [0])
    else:
        here.wait(*tickets)
        assert here.wait(here.post("WRITE", there.peer, [0], [0])) != [None]


def test_a_killed_peer_fails_its_tickets_and_no_others(world: World) -> None:
    here, there = world.pair(16, 1 << 20)
    victim = world.victim(here)
    assert here.wait(here.post("WRITE", victim.peer, range(16), range(16))) == [None]
    assert victim.digest(range(16)) == digest(here.pool)
    tickets = [here.post("WRITE", victim.peer, range(16), range(16)) for _ in range(20)]
    here.wait(tickets[0])
    victim.kill()
    late = here.post("WRITE", victim.peer, [0], [0])
    kept = here.post("WRITE", there.peer, [0], [0])
    errors = here.wait(*tickets, late)
    assert errors[-1] is not None
    assert here.wait(kept) == [None]
    here.backend.disconnect(victim.peer)
    here.collect()
    assert set(here.completed) >= {*tickets, late, kept}


def test_a_peer_restarted_behind_its_address_is_another_peer(world: World) -> None:
    here = world.node()
    here.fill(4)
    old = world.victim(here)
    assert here.wait(here.post("WRITE", old.peer, [0, 1], [2, 3])) == [None]
    old.kill()
    new = world.restarted(old)
    untouched = new.digest(range(NUM_PAGES))
    (error,) = here.wait(here.post("WRITE", old.peer, [0, 1], [2, 3]))
    assert error is not None, "a stale description reached the new process"
    assert new.digest(range(NUM_PAGES)) == untouched
    here.backend.disconnect(old.peer)
    world.join(here, new)
    assert here.wait(here.post("WRITE", new.peer, [0, 1], [2, 3])) == [None]
    assert new.digest([2, 3]) == digest(here.pool[[0, 1]])


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_completes_every_ticket_once(world: World, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = world.pair(NUM_PAGES, 4096)
    tickets: dict[str, list[Ticket]] = {node.peer: [] for node in pair}
    for _ in range(150):
        here, there = pair if rng.random() < 0.5 else pair[::-1]
        step = rng.choice(["post", "post", "post", "post", "collect", "meet", "part"])
        if step == "post":
            num_pages = int(rng.integers(0, NUM_PAGES + 1))
            local, remote = rng.permutation(NUM_PAGES)[:num_pages], rng.permutation(NUM_PAGES)[:num_pages]
            with suppress(PeerUnknown):
                tickets[here.peer].append(here.post(OPS[int(rng.integers(2))], there.peer, local, remote))
        elif step == "collect":
            here.collect()
        elif step == "meet":
            here.meet(there)
            there.meet(here)
        else:
            fence = here.backend.disconnect(there.peer)
            fenced = fence.delay_s == 0 and fence.passed()
            others_writes_end_here = digest(here.pool)
            here.collect()
            assert set(tickets[here.peer]) <= set(here.completed)
            assert not fenced or digest(here.pool) == others_writes_end_here
    for node in pair:
        node.wait(*tickets[node.peer])
        node.collect()
        assert set(node.completed) == set(tickets[node.peer])


# ---- resources ---------------------------------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    return threading.active_count(), psutil.Process().num_fds()


def test_two_thousand_transfers_leave_threads_and_descriptors_flat(world: World) -> None:
    here, there = world.pair()
    assert here.wait(here.post("WRITE", there.peer, [0], [0]), here.post("READ", there.peer, [0], [0])) == [None, None]
    before = held()
    rng = np.random.default_rng(1)
    for _ in range(200):
        tickets = [here.post(OPS[number % 2], there.peer, [int(page)], [int(page)]) for number, page in enumerate(rng.integers(0, NUM_PAGES, 10))]
        assert here.wait(*tickets) == [None] * 10
    assert held() == before


def test_meeting_and_parting_leaves_no_thread_and_no_descriptor(world: World) -> None:
    here = world.node()

    def meet_and_part() -> None:
        there = world.node()
        here.meet(there)
        there.meet(here)
        assert here.wait(*[here.post("WRITE", there.peer, [page], [page]) for page in range(8)]) == [None] * 8
        here.backend.disconnect(there.peer)
        there.close()

    meet_and_part()
    before = held()
    for _ in range(10):
        meet_and_part()
    assert held() == before


def test_sockets_per_peer_are_bounded(world: World) -> None:
    here, there = world.pair()
    before = psutil.Process().num_fds()
    tickets = [here.post("WRITE", there.peer, [page % NUM_PAGES], [page % NUM_PAGES]) for page in range(500)]
    assert here.wait(*tickets) == [None] * 500
    assert psutil.Process().num_fds() - before <= 4, "both ends of one connection, and room for one more"
