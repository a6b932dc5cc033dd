"""The contract of kvtransfer/backend.py, held against every backend in transfer_harness.HARNESSES."""

import itertools
import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import psutil
import pytest
from transfer_harness import HARNESSES, Harness, Node, ProcessVictim, Trait, Victim, backends_with, contents, digest, wait_passed

from kvtransfer.backend import Fence, Op, PeerId, PeerUnknown, Ticket, TransferError

PAGE_NBYTES = 192
NUM_PAGES = 64
OPS: tuple[Op, ...] = ("WRITE", "READ")
IDLE_GAPS_S = (6.0, 30.0)  # Mooncake 0.3.13.post1 failed the first transfer after 5 s; middleboxes and keep-alives act within 30 s
MAX_FDS_PER_PAIR = 24  # both ends; the leanest backend takes 2, Mooncake's engines with 4 streams 20
MAX_GROWTH_NBYTES = 8 << 20  # in 10,000 transfers: 800 bytes kept of each would show
PROMPT_S = 5.0  # for calls that never block; on an idle machine they take microseconds


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

    def talking_pair(self, num_pages: int, page_nbytes: int) -> tuple[Node, Node]:
        """As pair(), and their connections stand: what is posted next is soon in flight."""
        here, there = self.pair(num_pages, page_nbytes)
        for one, other in ((here, there), (there, here)):
            assert one.wait(one.post("READ", other.peer, [0], [0])) == [None]
            one.completed.clear()
        return here, there

    def victim(self, here: Node) -> Victim:
        """A killable node with a pool like `here`'s, joined with it."""
        self.victims.append(self._harness.victim(f"victim-{len(self.victims)}", *here.pool.shape))
        self.join(here, self.victims[-1])
        return self.victims[-1]

    def process(self, here: Node) -> ProcessVictim:
        """As victim(), of a backend that joins processes."""
        victim = self.victim(here)
        assert isinstance(victim, ProcessVictim)
        return victim

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


@pytest.fixture(scope="module", params=sorted(HARNESSES))
def lasting_pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    made = World(HARNESSES[request.param]())
    yield made.pair()
    made.close()


@pytest.fixture
def pair(lasting_pair: tuple[Node, Node]) -> tuple[Node, Node]:
    """Two nodes as World.pair() makes them, for tests that leave them joined: a few libraries take a second to make two."""
    for seed, node in enumerate(lasting_pair, 1):
        node.fill(seed)
        assert node.backend.poll() == []
        node.completed.clear()
    return lasting_pair


def held(pid: int | None = None) -> tuple[int, int]:
    """Threads, native ones too, and file descriptors of a process; None: this one."""
    process = psutil.Process(pid)
    return process.num_threads(), process.num_fds()


def grown(before: tuple[int, int], pid: int | None = None) -> list[int]:
    """By how much what the process held `before` has grown, if it stays so: the kernel counts a joined thread a moment longer."""
    deadline_s = time.monotonic() + PROMPT_S
    while True:
        growth = [max(0, now - then) for now, then in zip(held(pid), before, strict=True)]
        if not any(growth) or time.monotonic() > deadline_s:
            return growth
        time.sleep(0.01)


across_processes = pytest.mark.parametrize("world", backends_with(Trait.JOINS_PROCESSES), indirect=True)


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
def test_exactly_the_named_pages_move(pair: tuple[Node, Node], op: Op, layout: str) -> None:
    here, there = pair
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
def test_no_pages_complete_at_once(pair: tuple[Node, Node], op: Op) -> None:
    here, there = pair
    ticket = here.post(op, there.peer, [], [])
    assert [completion.ticket for completion in here.backend.poll()] == [ticket]


@pytest.mark.parametrize("op", OPS)
def test_page_lists_are_the_callers_again_when_post_returns(world: World, op: Op) -> None:
    here, there = world.pair(NUM_PAGES, 64 << 10)
    source = digest((here if op == "WRITE" else there).pool)
    local, remote = np.arange(NUM_PAGES, dtype=np.int32), np.arange(NUM_PAGES, dtype=np.int32)
    ticket = here.backend.post(op, there.peer, local, remote)
    local[:], remote[:] = 0, 1
    assert here.wait(ticket) == [None]
    assert digest(there.pool) == digest(here.pool) == source


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


def test_many_tickets_in_flight_complete_once_each(pair: tuple[Node, Node]) -> None:
    here, there = pair
    source = here.pool.copy()
    order = np.random.default_rng(5).permutation(NUM_PAGES)
    tickets = [here.post("WRITE", there.peer, [int(page)], [page_position]) for page_position, page in enumerate(order)]
    tickets += [here.post("WRITE", there.peer, [int(page)], [page_position]) for page_position, page in enumerate(order)]
    assert len(set(tickets)) == 2 * NUM_PAGES
    assert here.wait(*tickets) == [None] * len(tickets)
    here.collect()
    assert set(here.completed) == set(tickets)
    assert digest(there.pool) == digest(source[order])


def test_completed_writes_are_visible(pair: tuple[Node, Node]) -> None:
    here, there = pair
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


def test_completion_fd_is_readable_while_completions_wait(pair: tuple[Node, Node]) -> None:
    here, there = pair
    fd = here.backend.completion_fd()
    assert select.select([fd], [], [], 0)[0] == []
    tickets = [here.post("WRITE", there.peer, [page], [page]) for page in range(10)]
    here.wait(*tickets)
    assert select.select([fd], [], [], 0)[0] == []
    here.post("WRITE", there.peer, [], [])
    assert select.select([fd], [], [], 0)[0] == [fd]
    here.collect()


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
def test_bad_local_arguments_raise_and_post_nothing(pair: tuple[Node, Node], local: np.ndarray, remote: np.ndarray, sentence: str) -> None:
    here, there = pair
    before = digest(there.pool)
    with pytest.raises(ValueError, match=sentence):
        here.backend.post("WRITE", there.peer, local, remote)
    assert here.backend.poll() == []
    assert digest(there.pool) == before


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**31 - 1])
def test_a_remote_page_that_does_not_exist_fails_its_ticket_alone(pair: tuple[Node, Node], op: Op, page: int) -> None:
    here, there = pair
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
        with pytest.raises(TransferError, match="the peer's description"):
            method(PeerId("x"), b'{"backend": "carrier pigeon"}')
        with pytest.raises(TransferError, match="the peer's description"):
            method(PeerId("x"), b"\xff\x00")
    assert len(here.description) <= 4096


def test_another_page_size_is_refused(world: World) -> None:
    here, other = world.node(), world.node(page_nbytes=2 * PAGE_NBYTES)
    for method in (here.backend.connect, here.backend.accept):
        with pytest.raises(TransferError, match=f"{2 * PAGE_NBYTES} bytes, ours {PAGE_NBYTES}"):
            method(other.peer, other.description)


def test_only_accepted_peers_reach_a_region(world: World) -> None:
    here, there = world.node(), world.node()
    here.fill(1)
    there.fill(2)
    before = digest(here.pool), digest(there.pool)
    here.meet(there)
    assert None not in here.wait(*[here.post(op, there.peer, [0], [0]) for op in OPS])
    assert (digest(here.pool), digest(there.pool)) == before
    there.meet(here)
    assert here.wait(*[here.post(op, there.peer, [0], [0]) for op in OPS]) == [None, None]


# ---- ends --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_disconnect_completes_every_ticket_and_leaves_others_alone(world: World, op: Op) -> None:
    here, there = world.talking_pair(32, 1 << 20)
    other = world.node(32, 1 << 20)
    here.meet(other)
    other.meet(here)
    tickets = [here.post(op, there.peer, range(16), range(16)) for _ in range(8)]
    kept = here.post("WRITE", other.peer, range(16, 32), range(16))
    fence = here.backend.disconnect(there.peer)
    here.collect()
    assert set(tickets) <= set(here.completed), "disconnect() returned with tickets outstanding"
    wait_passed(fence)
    mine = digest(here.pool)
    assert here.wait(kept) == [None]
    assert digest(here.pool) == mine
    assert other.digest(range(16)) == here.digest(range(16, 32))


def test_nothing_lands_after_the_receivers_disconnect(world: World) -> None:
    here, there = world.talking_pair(16, 1 << 20)
    tickets = [here.post("WRITE", there.peer, range(16), np.roll(np.arange(16), shift)) for shift in range(40)]
    here.wait(tickets[0])
    there.part(here.peer)
    at_the_fence = digest(there.pool)
    here.wait(*tickets)
    assert digest(there.pool) == at_the_fence
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
    here, there = world.talking_pair(16, 1 << 20)
    tickets = [here.post(op, there.peer, range(16), range(16)) for op in OPS * 4]
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
    tickets = [here.post(op, victim.peer, range(16), range(16)) for op in OPS * 10]
    here.wait(tickets[0])
    victim.kill()
    late = [here.post(op, victim.peer, [0], [0]) for op in OPS]
    kept = here.post("WRITE", there.peer, [0], [0])
    assert None not in here.wait(*tickets, *late)[-2:]
    assert here.wait(kept) == [None]
    here.part(victim.peer)
    here.collect()
    assert set(here.completed) >= {*tickets, *late, kept}


def test_dead_peers_leave_no_thread_and_no_descriptor(world: World) -> None:
    here = world.node()

    def meet_and_lose() -> None:
        there = world.victim(here)
        assert here.wait(here.post("WRITE", there.peer, [0], [0])) == [None]
        there.kill()
        assert None not in here.wait(*[here.post(OPS[number % 2], there.peer, [0], [0]) for number in range(50)])
        here.part(there.peer)
        there.stop()

    meet_and_lose()
    before = held()
    for _ in range(2):
        meet_and_lose()
    assert grown(before) == [0, 0]


def test_an_unreachable_peer_shows_in_its_tickets(world: World) -> None:
    here, there, other = world.node(), world.node(), world.node()
    description = there.description
    there.close()
    here.meet(other)
    other.meet(here)
    here.meet_as(there.peer, description)
    lost = [here.post(op, there.peer, [0], [0]) for op in OPS]
    assert here.wait(here.post("WRITE", other.peer, [0], [0])) == [None]
    assert None not in here.wait(*lost)


def test_a_peer_restarted_behind_its_address_is_another_peer(world: World) -> None:
    here = world.node()
    here.fill(4)
    old = world.victim(here)
    assert here.wait(here.post("WRITE", old.peer, [0, 1], [2, 3])) == [None]
    old.kill()
    new = world.restarted(old)
    untouched = new.digest(range(NUM_PAGES))
    mine = digest(here.pool)
    errors = here.wait(*[here.post(op, old.peer, [0, 1], [2, 3]) for op in OPS])
    assert None not in errors, "a stale description reached the new process"
    assert (digest(here.pool), new.digest(range(NUM_PAGES))) == (mine, untouched)
    here.backend.disconnect(old.peer)
    world.join(here, new)
    assert here.wait(here.post("WRITE", new.peer, [0, 1], [2, 3])) == [None]
    assert new.digest([2, 3]) == digest(here.pool[[0, 1]])


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_completes_every_ticket_once(world: World, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = world.pair(NUM_PAGES, 4096)
    tickets: dict[str, list[Ticket]] = {node.peer: [] for node in pair}
    fences: dict[str, list[Fence]] = {node.peer: [] for node in pair}
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
            fences[here.peer].append(here.backend.disconnect(there.peer))
            fenced = all(fence.delay_s == 0 and fence.passed() for fence in fences[here.peer])
            others_writes_end_here = digest(here.pool)
            here.collect()
            assert set(tickets[here.peer]) <= set(here.completed)
            assert not fenced or digest(here.pool) == others_writes_end_here
    for node in pair:
        node.wait(*tickets[node.peer])
        node.collect()
        assert set(node.completed) == set(tickets[node.peer])


# ---- another process ---------------------------------------------------------------------------------------------------------


@across_processes
def test_scattered_bytes_are_equal_in_another_process(world: World) -> None:
    here = world.node(4096, 16 << 10)
    here.fill(1)
    there = world.process(here)
    there.fill(2)
    expected = contents(2, *here.pool.shape)
    rng = np.random.default_rng(3)
    local, remote = rng.permutation(4096), rng.permutation(4096)
    expected[remote[:2048]] = here.pool[local[:2048]]
    assert here.wait(here.post("WRITE", there.peer, local[:2048], remote[:2048])) == [None]
    assert there.digest(range(4096)) == digest(expected)
    expected_here = here.pool.copy()
    expected_here[local] = expected[remote]
    assert here.wait(here.post("READ", there.peer, local, remote)) == [None]
    assert digest(here.pool) == digest(expected_here)
    assert here.wait(here.post("WRITE", there.peer, remote, remote)) == [None]
    assert there.digest(range(4096)) == digest(expected_here)


@across_processes
def test_a_completed_write_is_visible_to_the_other_process_and_leaves_its_source_free(world: World) -> None:
    here = world.node(NUM_PAGES, 16 << 10)
    there = world.process(here)
    for round_number in range(30):
        here.fill(round_number)
        written = digest(here.pool)
        assert here.wait(here.post("WRITE", there.peer, range(NUM_PAGES), range(NUM_PAGES))) == [None]
        here.pool[:] = 0xEE
        assert there.digest(range(NUM_PAGES)) == written


@across_processes
def test_many_rooms_in_flight_both_ways(world: World) -> None:
    pages_each, num_rooms, page_nbytes = 8, 256, 4096
    here = world.node(2 * pages_each * num_rooms, page_nbytes)
    here.fill(1)
    there = world.process(here)
    there.fill(2)
    rng = np.random.default_rng(9)
    mine, theirs = (half.reshape(num_rooms, pages_each) for half in np.split(rng.permutation(2 * pages_each * num_rooms), 2))
    expected_here, expected_there = contents(1, *here.pool.shape), contents(2, *here.pool.shape)
    expected_there[mine] = expected_here[mine]
    expected_here[theirs] = contents(2, *here.pool.shape)[theirs]
    tickets = []
    for my_room, their_room in zip(mine, theirs, strict=True):
        there.post("WRITE", here, their_room, their_room)
        tickets.append(here.post("WRITE", there.peer, my_room, my_room))
    assert here.wait(*tickets) == [None] * num_rooms
    assert there.wait() == [None] * num_rooms
    assert digest(here.pool) == digest(expected_here)
    assert there.digest(range(len(here.pool))) == digest(expected_there)


@across_processes
def test_nodes_of_several_processes_write_to_each_other(world: World) -> None:
    """Each of four nodes writes its quarter to all others: all four pools end equal."""
    quarter = 64
    homes = [world.node(4 * quarter, 4096) for _ in range(2)]
    for here, other in itertools.permutations(homes):
        here.meet(other)
    away = [world.process(homes[0]), world.process(homes[0])]
    for victim in away:
        world.join(homes[1], victim)
    for victim, other in itertools.permutations(away):
        victim.meet(other)
    expected = np.concatenate([contents(number, 4 * quarter, 4096)[number * quarter :][:quarter] for number in range(4)])
    tickets = []
    for number, node in enumerate((*homes, *away)):
        node.fill(number)
    for number, node in enumerate((*homes, *away)):
        pages = range(number * quarter, (number + 1) * quarter)
        for other in (*homes, *away):
            if other is not node:
                if isinstance(node, Node):
                    tickets.append((node, node.post("WRITE", other.peer, pages, pages)))
                else:
                    node.post("WRITE", other, pages, pages)
    assert [node.wait(ticket) for node, ticket in tickets] == [[None]] * 6
    assert [victim.wait() for victim in away] == [[None] * 3] * 2
    assert {node.digest(range(4 * quarter)) for node in (*homes, *away)} == {digest(expected)}


@across_processes
def test_a_frozen_peer_holds_nobody_up_and_goes_on_afterwards(world: World) -> None:
    here, other = world.pair(16, 1 << 20)
    slow = world.process(here)
    assert here.wait(here.post("WRITE", slow.peer, [0], [0])) == [None]
    slow.freeze()
    started_s = time.monotonic()
    tickets = [here.post("WRITE", slow.peer, range(16), range(16)) for _ in range(4)]
    tickets += [here.post("READ", slow.peer, [0], [0])]
    for _ in range(20):
        assert here.wait(here.post("WRITE", other.peer, range(16), range(16))) == [None]
    here.collect()
    assert time.monotonic() - started_s < PROMPT_S
    slow.thaw()
    assert here.wait(*tickets) == [None] * 5
    assert slow.digest(range(16)) == digest(here.pool)


@across_processes
def test_a_frozen_writer_lands_nothing_after_its_fence(world: World) -> None:
    here, other = world.pair(16, 1 << 20)
    writer = world.process(here)
    writer.fill(7)
    writer.post("WRITE", here, [0], [0])
    assert writer.wait() == [None]
    writer.post("WRITE", here, range(16), range(16), times=100)
    writer.freeze()
    tickets = [here.post(op, writer.peer, range(16), range(16)) for op in OPS]
    started_s = time.monotonic()
    fence = here.backend.disconnect(writer.peer)
    here.collect()
    assert time.monotonic() - started_s < PROMPT_S
    assert set(tickets) <= set(here.completed)
    time.sleep(fence.delay_s)
    if not fence.passed():  # it may stand in the middle of a copy
        writer.thaw()
        wait_passed(fence)
    mine = contents(1, 16, 1 << 20)
    here.pool[:] = mine  # its pages have other owners now
    writer.thaw()
    assert len(writer.wait()) == 100
    assert digest(here.pool) == digest(mine)
    assert here.wait(here.post("WRITE", other.peer, range(16), range(16))) == [None]
    assert other.digest(range(16)) == digest(mine)


@across_processes
@pytest.mark.parametrize("closer", ["here", "there"])
def test_close_in_flight_ends_the_tickets_of_the_other_process(world: World, closer: str) -> None:
    here = world.node(16, 1 << 20)
    there = world.process(here)
    there.fill(2)
    there.post("READ", here, range(16), range(16), times=10)
    there.post("WRITE", here, range(16), range(16), times=10)
    tickets = [here.post(op, there.peer, range(16), range(16)) for op in OPS * 10]
    if closer == "here":
        here.close()
        before = digest(here.pool)
        assert set(here.completed) == set(tickets)
        assert len(there.wait()) == 20
        there.post("WRITE", here, [0], [0])
        assert there.wait() != [None]
        assert digest(here.pool) == before
    else:
        there.close()
        assert len(there.wait()) == 20
        here.wait(*tickets)
        assert here.wait(here.post("WRITE", there.peer, [0], [0])) != [None]


@across_processes
def test_a_writer_killed_midway_is_fenced_and_harms_nobody(world: World) -> None:
    here, other = world.pair(16, 1 << 20)
    writer = world.process(here)
    writer.post("WRITE", here, [0], [0])
    assert writer.wait() == [None]
    writer.post("WRITE", here, range(16), range(16), times=100)
    kept = here.post("WRITE", other.peer, [0], [0])
    writer.kill()
    wait_passed(here.backend.disconnect(writer.peer))
    here.fill(1)
    assert here.wait(kept, here.post("WRITE", other.peer, range(16), range(16))) == [None, None]
    assert digest(here.pool) == digest(contents(1, 16, 1 << 20)) == other.digest(range(16))


@pytest.mark.timeout(180)
def test_pairs_that_were_idle_still_transfer(request: pytest.FixtureRequest) -> None:
    """All backends' pairs side by side: the gaps are the subject, and are waited for once."""
    worlds = {name: World(HARNESSES[name]()) for name in backends_with(Trait.JOINS_PROCESSES)}
    for world in worlds.values():
        request.addfinalizer(world.close)
    pairs: dict[str, tuple[Node, ProcessVictim]] = {}
    for name, world in worlds.items():
        here = world.node()
        pairs[name] = here, world.process(here)
    for number, gap_s in enumerate((0.0, *IDLE_GAPS_S)):
        time.sleep(gap_s)
        for name, (here, there) in pairs.items():
            here.fill(number)
            assert here.wait(here.post("WRITE", there.peer, range(32), range(32))) == [None], f"{name} after {gap_s} s"
            assert there.digest(range(32)) == here.digest(range(32)), f"{name} after {gap_s} s"
            there.fill(number + 100)
            there.post("WRITE", here, range(32), range(32, 64))
            assert there.wait() == [None], f"{name} backwards after {gap_s} s"
            assert here.digest(range(32, 64)) == there.digest(range(32)), f"{name} backwards after {gap_s} s"


# ---- resources ---------------------------------------------------------------------------------------------------------------


def test_ten_thousand_transfers_leave_everything_flat(world: World) -> None:
    here = world.node(NUM_PAGES, 4096)
    there = world.victim(here)
    rng = np.random.default_rng(1)

    def transfer(num_tickets: int) -> None:
        for start in range(0, num_tickets, 50):
            pages = rng.permutation(NUM_PAGES)[:50]
            tickets = [here.post(OPS[number % 2], there.peer, [page], [page]) for number, page in enumerate(pages.tolist(), start)]
            assert here.wait(*tickets) == [None] * 50
        here.completed.clear()

    transfer(1000)
    before = [(held(pid), psutil.Process(pid).memory_info().rss) for pid in (here.pid, there.pid)]
    transfer(10_000)
    for pid, (held_before, rss_before) in zip((here.pid, there.pid), before, strict=True):
        assert grown(held_before, pid) == [0, 0]
        assert psutil.Process(pid).memory_info().rss - rss_before < MAX_GROWTH_NBYTES


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
    for _ in range(5):
        meet_and_part()
    assert grown(before) == [0, 0]


def test_descriptors_per_peer_are_bounded_whatever_is_in_flight(world: World) -> None:
    """A backend may open its streams as they are needed; the number of transfers does not count beyond them."""
    here, there = world.pair()
    before = psutil.Process().num_fds()

    def most(num_tickets: int) -> int:
        tickets = [here.post("WRITE", there.peer, [page % NUM_PAGES], [page % NUM_PAGES]) for page in range(num_tickets)]
        in_flight = psutil.Process().num_fds() - before
        assert here.wait(*tickets) == [None] * num_tickets
        return max(in_flight, psutil.Process().num_fds() - before)

    of_some = most(500)
    assert of_some <= MAX_FDS_PER_PAIR
    assert most(1000) <= of_some + 1
