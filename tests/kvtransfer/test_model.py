"""Any interleaving of prefill nodes, decode nodes, a bad network and death: the rules of pages and of ends hold.

Books are kept of every page. A free page holds a mark: a write that lands in it shows at once (R2). A page on P is marked the moment
P's scheduler gets it back: a write that reads it later delivers the mark and shows at delivery. Every room gets its events in a legal
order (EventLog) and, in the end, exactly one terminal event in every living process (R3, R5); no table keeps anything.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transfer_sim import NUM_PAGES, PAGE_NBYTES, PAGE_SIZE, SimDecode, SimNetwork, SimPrefill, SimProcess, settings

from common.errors import Failure
from kvtransfer.backend import TransferError
from kvtransfer.events import Delivered, Event, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.link import Address
from kvtransfer.protocol import num_pages_of

FREE_ON_D, FREE_ON_P = 0xEE, 0xDD
GONE = Failure(499, "gone", code="cancelled", stage="test")
SETTINGS = settings(peer_timeout_s=3.0, offer_timeout_s=20.0, max_rooms=6)
MAX_STEPS_TO_QUIET = 200


@dataclass
class Request:
    room: int
    num_tokens: int
    decode_prefix_pages: int
    digest_on_d: bytes
    timeout_s: float

    @property
    def num_pages(self) -> int:
        return num_pages_of(self.num_tokens, PAGE_SIZE)


def content(room: int, first_page: int, stop_page: int) -> np.ndarray:
    """uint8[n, PAGE_NBYTES]: what these prompt pages hold; never a mark."""
    pages = np.arange(first_page, stop_page)[:, None]
    return ((room * 31 + pages * 7 + np.arange(PAGE_NBYTES)) % 200).astype(np.uint8)


class PageBook:
    """Who has which page of one process; free ones hold `mark`."""

    def __init__(self, process: SimProcess, mark: int) -> None:
        self.pool, self.mark = process.pool, mark
        self.free = list(range(NUM_PAGES))
        self.taken: dict[int, list[int]] = {}
        self.pool[:] = mark

    def take(self, room: int, count: int) -> np.ndarray:
        self.taken[room], self.free = self.free[:count], self.free[count:]
        assert len(self.taken[room]) == count
        return np.array(self.taken[room], np.int32)

    def give_back(self, room: int) -> None:
        pages = self.taken.pop(room)
        self.pool[pages] = self.mark
        self.free += pages

    def check(self) -> None:
        assert (self.pool[self.free] == self.mark).all(), "a write landed in a free page"


class Books:
    """P's or D's scheduler, as far as pages go. Hooked into the process's events."""

    def __init__(self, process: SimPrefill | SimDecode) -> None:
        self.process = process
        self.pages = PageBook(process, FREE_ON_D if isinstance(process, SimDecode) else FREE_ON_P)
        self.requests: dict[int, Request] = {}
        self.at_work: dict[int, int] = {}  # P: room -> pages handed over; one more: token 1 too
        process.on_event = self.on_event  # type: ignore[method-assign]

    def on_event(self, event: Event) -> None:
        room = event.room
        if isinstance(event, OfferJoined):
            self.at_work[room] = 0
        elif isinstance(event, RoomFailed):
            self.at_work.pop(room, None)
        elif isinstance(event, Delivered | PagesReturned):
            self.at_work.pop(room, None)
            if isinstance(event, Delivered) and isinstance(self.process, SimDecode):
                request, pages = self.requests[room], self.pages.taken[room]
                assert (self.process.pool[pages] == content(room, request.decode_prefix_pages, request.num_pages)).all()
            if room in self.pages.taken:
                self.pages.give_back(room)


class Transfers(RuleBasedStateMachine):
    @initialize(fence_delay_s=st.sampled_from([0.0, 1.5]), num_prefill=st.integers(1, 2), num_decode=st.integers(1, 2))
    def start(self, fence_delay_s: float, num_prefill: int, num_decode: int) -> None:
        self.network = SimNetwork(fence_delay_s)
        self.network.fabric.hold()
        self.prefills: list[tuple[SimPrefill, Books]] = [self.new_prefill(port) for port in range(num_prefill)]
        self.decodes: list[tuple[SimDecode, Books]] = [self.new_decode() for _ in range(num_decode)]
        self.killed: set[Address] = set()
        self.next_room = 1
        self.requests: list[tuple[Request, int, int]] = []  # with the port and the decode node

    def new_prefill(self, port: int) -> tuple[SimPrefill, Books]:
        process = self.network.prefill(port, SETTINGS)
        return process, Books(process)

    def new_decode(self) -> tuple[SimDecode, Books]:
        process = self.network.decode(SETTINGS)
        return process, Books(process)

    # ---- requests ------------------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        num_tokens=st.integers(1, 12),
        digest_on_d=st.sampled_from([b"same"] * 15 + [b"other"]),
        timeout_s=st.sampled_from([2.0, 60.0, 60.0]),
        sides=st.sampled_from(["expect offer"] * 4 + ["offer expect"] * 4 + ["expect", "offer"]),
    )
    def submit(self, data: st.DataObject, num_tokens: int, digest_on_d: bytes, timeout_s: float, sides: str) -> None:
        """A request; a side that does not get it now may get it later, or never."""
        port, decode = data.draw(st.integers(0, len(self.prefills) - 1)), data.draw(st.integers(0, len(self.decodes) - 1))
        prefix = data.draw(st.integers(0, num_pages_of(num_tokens, PAGE_SIZE)))
        request = Request(self.next_room, num_tokens, prefix, digest_on_d, timeout_s)
        self.next_room += 1
        self.requests.append((request, port, decode))
        for side in sides.split():
            getattr(self, side)(request, port, decode)
            if data.draw(st.booleans()):
                self.network.pump()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), side=st.sampled_from(["expect", "offer"]))
    def submit_again(self, data: st.DataObject, side: str) -> None:
        """A side gets a request late, or a second time, or another decode node gets it."""
        request, port, _ = data.draw(st.sampled_from(self.requests))
        getattr(self, side)(request, port, data.draw(st.integers(0, len(self.decodes) - 1)))

    def expect(self, request: Request, port: int, decode: int) -> None:
        process, books = self.prefills[port]
        if process.alive and request.room not in process.log.by_room and len(books.pages.taken) < SETTINGS.max_rooms:
            pages = books.pages.take(request.room, request.num_pages)
            process.pool[pages] = content(request.room, 0, request.num_pages)
            books.requests[request.room] = request
            process.log.open(request.room)
            process.session.expect(request.room, request.num_tokens, b"same", self.network.now_s + request.timeout_s, self.network.now_s)
            process.step()

    def offer(self, request: Request, port: int, decode: int) -> None:
        process, books = self.decodes[decode]
        if process.alive and request.room not in process.log.by_room and len(books.pages.taken) < SETTINGS.max_rooms:
            pages = books.pages.take(request.room, request.num_pages - request.decode_prefix_pages)
            books.requests[request.room] = request
            process.log.open(request.room)
            now_s, unix_s = self.network.now_s + request.timeout_s, self.network.unix_s + request.timeout_s
            process.session.offer(
                request.room, self.prefills[port][0].address, request.num_tokens, request.digest_on_d, request.decode_prefix_pages, pages,
                now_s, unix_s, self.network.now_s,
            )  # fmt: skip
            process.step()

    def at_work(self) -> list[tuple[SimPrefill, Books, int]]:
        return [(process, books, room) for process, books in self.prefills if process.alive for room in books.at_work]

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), chunks=st.lists(st.integers(1, 3), min_size=1, max_size=5))
    def work(self, data: st.DataObject, chunks: list[int]) -> None:
        process, books, room = data.draw(st.sampled_from(self.at_work()))
        for num_pages in chunks:
            self.work_on(process, books, room, num_pages)

    def work_on(self, process: SimPrefill, books: Books, room: int, num_pages: int) -> None:
        """P's scheduler: some pages, or when there are none left token 1, or the end."""
        if room not in books.at_work:
            return
        done, request, pages = books.at_work[room], books.requests[room], books.pages.taken[room]
        if done < request.num_pages:
            books.at_work[room] = min(done + num_pages, request.num_pages)
            process.session.send_pages(room, done, np.array(pages[done : done + num_pages], np.int32), self.network.now_s)
        elif done == request.num_pages:
            books.at_work[room] += 1
            process.session.send_first_token(room, 7, 0, self.network.now_s)
        else:
            del books.at_work[room]
            process.session.finish(room, self.network.now_s)
        process.step()

    def open_rooms(self) -> list[tuple[SimPrefill | SimDecode, int]]:
        return [(process, room) for process in self.network.processes() for room in process.log.open_rooms()]

    @precondition(lambda self: self.open_rooms())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        process, room = data.draw(st.sampled_from(self.open_rooms()))
        process.log.aborted.add(room)
        for node, books in (*self.prefills, *self.decodes):
            if node is process:
                books.at_work.pop(room, None)
        process.session.abort(room, GONE, self.network.now_s)
        process.step()

    # ---- the network and the backend --------------------------------------------------------------------------------------

    @precondition(lambda self: self.network.queues())
    @rule(data=st.data(), what=st.sampled_from(["deliver"] * 6 + ["drop", "repeat"]))
    def frame(self, data: st.DataObject, what: str) -> None:
        getattr(self.network, what)(*data.draw(st.sampled_from(self.network.queues())))

    @rule()
    def pump(self) -> None:
        self.network.pump()

    @precondition(lambda self: self.network.fabric.in_flight)
    @rule(data=st.data(), works=st.sampled_from([True] * 5 + [False]))
    def end_write(self, data: st.DataObject, works: bool) -> None:
        transfer = data.draw(st.sampled_from(self.network.fabric.in_flight))
        self.network.fabric.finish(transfer, None if works else TransferError("injected"))
        self.step_all()

    @precondition(lambda self: self.network.fabric.in_flight)
    @rule()
    def end_writes(self) -> None:
        self.network.fabric.release(100)
        self.step_all()

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.5, 1.0, 2.0, 35.0]), pump=st.sampled_from([True, True, False]))
    def advance(self, seconds: float, pump: bool) -> None:
        self.network.advance(seconds)
        if pump:
            self.network.pump()

    # ---- breaks and death -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.network.open_connections())
    @rule(data=st.data(), pump=st.booleans())
    def cut(self, data: st.DataObject, pump: bool) -> None:
        self.network.cut(data.draw(st.sampled_from(self.network.open_connections())))
        if pump:
            self.network.pump()

    @rule(data=st.data(), how=st.sampled_from(["prefill", "prefill", "prefill for a while", "decode"]))
    @precondition(lambda self: self.next_room > 2)
    def kill(self, data: st.DataObject, how: str) -> None:
        if how == "decode":
            decode = data.draw(st.integers(0, len(self.decodes) - 1))
            self.network.kill(self.decodes[decode][0])
            self.decodes[decode] = self.new_decode()
            return
        port = data.draw(st.integers(0, len(self.prefills) - 1))
        self.killed.add(self.prefills[port][0].address)
        was_alive = self.prefills[port][0].alive
        self.network.kill(self.prefills[port][0])
        if how == "prefill" or not was_alive:
            self.prefills[port] = self.new_prefill(port)

    # ---- what must hold ----------------------------------------------------------------------------------------------------

    @invariant()
    def free_pages_are_untouched(self) -> None:
        for process, books in (*getattr(self, "prefills", []), *getattr(self, "decodes", [])):
            if process.alive:
                books.pages.check()

    def step_all(self) -> None:
        for process in self.network.processes():
            process.step()

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        for _ in range(MAX_STEPS_TO_QUIET):
            self.network.fabric.release(100)
            self.step_all()
            self.network.pump()
            for process, books, room in self.at_work():
                self.work_on(process, books, room, 1)
            if not self.open_rooms() and not self.held():
                break
            self.network.advance(0.5)
            self.free_pages_are_untouched()
        assert not self.open_rooms(), [(process.incarnation, room, process.log.by_room[room]) for process, room in self.open_rooms()]
        assert self.held() == {}
        for process, books in (*self.prefills, *self.decodes):
            if process.alive:
                books.pages.check()
                assert sorted(books.pages.free) == list(range(NUM_PAGES))
                assert process.backend.tickets.num_open == 0
        self.both_sides_agree()

    def held(self) -> dict[str, float]:
        """Rooms left in any table."""
        return {
            f"{process.incarnation} {name}": count
            for process in self.network.processes()
            for name, count in process.session.stats().items()
            if name.startswith("transfer_rooms_") and count
        }

    def both_sides_agree(self) -> None:
        """What D took for delivered, P had delivered, if it is still the P that D met."""
        lived = [process for process, _ in self.prefills if process.address not in self.killed]
        ends = {room: process.log.by_room[room][-1] for process in lived for room in process.log.by_room}
        for process, _ in self.decodes:
            for room, events in process.log.by_room.items():
                if isinstance(events[-1], Delivered) and room in ends:
                    assert ends[room] == Delivered(room)


TestTransfers = Transfers.TestCase
TestTransfers.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_the_model_delivers_when_nothing_goes_wrong() -> None:
    """The model itself: without mishap every room is delivered."""
    model = Transfers()
    model.start(0.0, 2, 2)
    model.network.fabric.resume()
    for room in range(1, 9):
        request = Request(room, 1 + room, room % 2, b"same", 60.0)
        model.expect(request, room % 2, room // 2 % 2)
        model.offer(request, room % 2, room // 2 % 2)
    model.teardown()
    for process in model.network.processes():
        assert process.log.by_room
        assert all(isinstance(events[-1], Delivered) for events in process.log.by_room.values())
