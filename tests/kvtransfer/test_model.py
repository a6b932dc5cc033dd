"""Any interleaving of prefill nodes, decode nodes, a bad network, bad backends, stopped processes and death: the rules of pages and
of ends hold.

Books are kept of every page. A free page holds a mark: a write that lands in it shows at once (R2). A page on P is marked the moment
P's scheduler gets it back: a write that reads it later delivers the mark and shows at delivery. Free and held pages add up (R1). Every
room gets its events in a legal order (EventLog), an answer before its deadline while its process runs, and exactly one terminal event
in every living process (R3, R5); in the end no table keeps anything.

Backends are two-sided (D can cut P off by itself, as tcp does) or one-sided (a write that P posts lands whether or not D still wants
it, as with RDMA; support/faults.py). A process may be frozen in the middle of a step and go on later with the time it knew.

The same examples run every time, EXAMPLES of them. `make model EXAMPLES=20000` runs others, at random.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
from faults import Decision, Faults, FaultyBackend
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from transfer_sim import NUM_PAGES, PAGE_NBYTES, PAGE_SIZE, SimDecode, SimNetwork, SimPrefill, SimProcess, settings

from common.errors import Failure
from kvtransfer.backend import NO_FENCE
from kvtransfer.events import Delivered, Event, OfferJoined, PagesReturned, RoomFailed
from kvtransfer.link import Address
from kvtransfer.machine import IllegalTransition
from kvtransfer.protocol import num_pages_of

RANDOM_EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "0"))
EXAMPLES = RANDOM_EXAMPLES or 2000
STEPS = 40  # of an example, at most
FREE_ON_D, FREE_ON_P, NOT_COMPUTED = 0xEE, 0xDD, 0xCC
GONE = Failure(499, "gone", code="cancelled", stage="test")
MAX_ROOMS = 6
MAX_STEPS_TO_QUIET = 300

T = TypeVar("T")
NUMBER = st.integers(0, 999)
WEIGHTS = {  # the first is what a step that does not matter shrinks to
    "pump": 3, "submit": 6, "submit_again": 1, "withdraw": 1, "work": 7, "work_unaware": 1, "end_kernels": 2, "abort": 2, "frame": 7, "end_write": 3,
    "end_writes": 2, "refuse_post": 1, "advance": 5, "cut": 2, "freeze": 1, "thaw": 2, "stop": 1, "kill": 1,
}  # fmt: skip


def pick(some: Sequence[T], number: int) -> T:
    return some[number % len(some)]


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


@dataclass
class Kernel:
    """Computes pages some time after they were handed over; the event that says so (outgoing.Ready)."""

    books: "Books"
    room: int
    first_page: int
    pages: list[int]
    done: bool = False

    def query(self) -> bool:
        return self.done

    def end(self) -> None:
        self.done = True
        if self.room in self.books.pages.taken:
            self.books.pages.pool[self.pages] = content(self.room, self.first_page, self.first_page + len(self.pages))


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
        self.free = pages + self.free  # used again at once

    def check(self) -> None:
        assert (self.pool[self.free] == self.mark).all(), "a write landed in a free page"
        assert len(self.free) + sum(map(len, self.taken.values())) == NUM_PAGES


class Books:
    """P's or D's scheduler, as far as pages go. Hooked into the process's events."""

    def __init__(self, process: SimPrefill | SimDecode) -> None:
        self.process = process
        self.pages = PageBook(process, FREE_ON_D if isinstance(process, SimDecode) else FREE_ON_P)
        self.requests: dict[int, Request] = {}
        self.unanswered: dict[int, float] = {}  # room -> deadline
        self.at_work: dict[int, int] = {}  # P: room -> pages handed over; one more: token 1 too
        self.unaware: dict[int, int] = {}  # the same, of rooms that failed; a scheduler hears of it later
        self.prompts: dict[int, list[int]] = {}  # room -> its pages, also when they are others' again
        process.on_event = self.on_event  # type: ignore[method-assign]

    def open(self, request: Request, num_pages: int) -> np.ndarray:
        """Its pages."""
        room = request.room
        self.requests[room] = request
        self.unanswered[room] = self.process.network.now_s + request.timeout_s
        self.process.log.open(room)
        pages = self.pages.take(room, num_pages)
        self.prompts[room] = pages.tolist()
        return pages

    def abort(self, room: int) -> None:
        self.process.log.aborted.add(room)
        self.at_work.pop(room, None)
        self.unanswered.pop(room, None)

    def on_event(self, event: Event) -> None:
        room = event.room
        if isinstance(event, OfferJoined):
            self.at_work[room] = 0
        elif isinstance(event, RoomFailed):
            if room in self.at_work:
                self.unaware[room] = self.at_work.pop(room)
            self.unanswered.pop(room, None)
        elif isinstance(event, Delivered | PagesReturned):
            self.at_work.pop(room, None)
            self.unanswered.pop(room, None)
            if isinstance(event, Delivered) and isinstance(self.process, SimDecode):
                request, pages = self.requests[room], self.pages.taken[room]
                assert (self.process.pool[pages] == content(room, request.decode_prefix_pages, request.num_pages)).all()
            self.pages.give_back(room)


class Transfers(RuleBasedStateMachine):
    num_examples = 0
    num_delivered = 0

    @initialize(
        one_sided=st.booleans(),
        digest=st.booleans(),
        post_tokens=st.sampled_from([1, 8, 1024]),
        num_prefill=st.integers(1, 2),
        num_decode=st.integers(1, 2),
    )
    def start(self, one_sided: bool, digest: bool, post_tokens: int, num_prefill: int, num_decode: int) -> None:
        type(self).num_examples += 1
        self.settings = settings(peer_timeout_s=3.0, offer_timeout_s=20.0, max_rooms=MAX_ROOMS, digest=digest, post_tokens=post_tokens)
        self.faults = EveryWriteWaits(one_sided=one_sided, fence_delay_s=1.0, now=lambda: self.network.now_s)
        self.kernels: list[Kernel] = []
        self.network = SimNetwork(faults=self.faults)
        self.prefills: list[tuple[SimPrefill, Books]] = [self.new_prefill(port) for port in range(num_prefill)]
        self.decodes: list[tuple[SimDecode, Books]] = [self.new_decode() for _ in range(num_decode)]
        self.killed: set[Address] = set()
        self.next_room = 1
        self.requests: list[tuple[Request, int]] = []  # with the port

    def new_prefill(self, port: int) -> tuple[SimPrefill, Books]:
        process = self.network.prefill(port, self.settings)
        return process, Books(process)

    def new_decode(self) -> tuple[SimDecode, Books]:
        process = self.network.decode(self.settings)
        return process, Books(process)

    def nodes(self) -> list[tuple[SimPrefill | SimDecode, Books]]:
        return [*self.prefills, *self.decodes]

    @rule(op=st.sampled_from([op for op, weight in WEIGHTS.items() for _ in range(weight)]), n=NUMBER, m=NUMBER, k=NUMBER)
    def act(self, op: str, n: int, m: int, k: int) -> None:
        """One rule, so that weights are weights, and what may not happen now costs little. The numbers say which one and how."""
        getattr(self, op)(n, m, k)

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def submit(self, n: int, m: int, k: int) -> None:
        """A request; a side that does not get it now may get it later, or never."""
        num_tokens, timeout_s = 1 + n % 12, 2.0 if k % 5 == 0 else 60.0
        prefix = n // 12 % (num_pages_of(num_tokens, PAGE_SIZE) + 1) if n >= 500 else 0
        request = Request(self.next_room, num_tokens, prefix, b"other" if k % 16 == 15 else b"same", timeout_s)
        self.next_room += 1
        port, decode = m % len(self.prefills), m // 2 % len(self.decodes)
        self.requests.append((request, port))
        for side in pick(("expect", "offer", "expect offer", "offer expect", "expect offer", "offer expect"), k // 16).split():
            getattr(self, side)(request, port, decode)
            if m >= 500:
                self.network.pump()

    def submit_again(self, n: int, m: int, k: int) -> None:
        """A side gets a request late, or a second time, or another decode node gets it."""
        if self.requests:
            request, port = pick(self.requests, n)
            getattr(self, pick(("expect", "offer"), k))(request, port, m % len(self.decodes))

    def withdraw(self, n: int, m: int, k: int) -> None:
        """D says that it will make no offer."""
        if self.requests:
            request, port = pick(self.requests, n)
            process, _ = pick(self.decodes, m)
            if process.frozen_at_s is None and request.room not in process.log.by_room:
                process.session.withdraw(request.room, self.prefills[port][0].address, GONE, self.network.now_s)
                process.step()

    def expect(self, request: Request, port: int, decode: int) -> None:
        process, books = self.prefills[port]
        if self.takes(process, books, request.room):
            process.pool[books.open(request, request.num_pages)] = content(request.room, 0, request.num_pages)
            process.session.expect(request.room, request.num_tokens, b"same", self.network.now_s + request.timeout_s, self.network.now_s)
            process.step()

    def offer(self, request: Request, port: int, decode: int) -> None:
        process, books = self.decodes[decode]
        if self.takes(process, books, request.room):
            pages = books.open(request, request.num_pages - request.decode_prefix_pages)
            now_s, unix_s = self.network.now_s + request.timeout_s, self.network.unix_s + request.timeout_s
            process.session.offer(
                request.room, self.prefills[port][0].address, request.num_tokens, request.digest_on_d, request.decode_prefix_pages, pages,
                now_s, unix_s, self.network.now_s,
            )  # fmt: skip
            process.step()

    @staticmethod
    def takes(process: SimProcess, books: Books, room: int) -> bool:
        return Transfers.runs(process) and room not in process.log.by_room and len(books.pages.taken) < MAX_ROOMS

    @staticmethod
    def runs(process: SimProcess) -> bool:
        return process.alive and process.frozen_at_s is None

    def at_work(self) -> list[tuple[SimPrefill, Books, int]]:
        return [(process, books, room) for process, books in self.prefills if self.runs(process) for room in books.at_work]

    def work(self, n: int, m: int, k: int) -> None:
        if rooms := self.at_work():
            for _ in range(1 + k % 6):
                self.work_on(*pick(rooms, n), 1 + m % 3, on_device=k % 3 == 0)

    def work_unaware(self, n: int, m: int, k: int) -> None:
        """P's scheduler goes on with a room that has failed, until it reads of it."""
        if unaware := [(process, books, room) for process, books in self.prefills if self.runs(process) for room in books.unaware]:
            process, books, room = pick(unaware, n)
            for _ in range(1 + k % 6):
                self.work_on(process, books, room, 1 + m % 3)
            books.unaware.pop(room, None)

    def end_kernels(self, *_: int) -> None:
        for kernel in self.kernels:
            kernel.end()
        self.kernels.clear()
        self.step_all()

    def work_on(self, process: SimPrefill, books: Books, room: int, num_pages: int, *, on_device: bool = False, step: bool = True) -> None:
        """P's scheduler: some pages, or when there are none left token 1, or the end."""
        under_way = books.at_work if room in books.at_work else books.unaware
        if room not in under_way:
            return
        done, request, pages = under_way[room], books.requests[room], books.prompts[room]
        if done < request.num_pages:
            under_way[room] = min(done + num_pages, request.num_pages)
            chunk = pages[done : done + num_pages]
            kernel = Kernel(books, room, done, chunk) if on_device and under_way is books.at_work else None
            if kernel is not None:
                self.kernels.append(kernel)
                process.pool[chunk] = NOT_COMPUTED
            process.session.send_pages(room, done, np.array(chunk, np.int32), self.network.now_s, kernel)
        elif done == request.num_pages:
            under_way[room] += 1
            process.session.send_first_token(room, 7, 0, self.network.now_s)
        else:
            del under_way[room]
            process.session.finish(room, self.network.now_s)
        if step:
            process.step()

    def open_rooms(self) -> list[tuple[SimPrefill | SimDecode, Books, int]]:
        return [(process, books, room) for process, books in self.nodes() if self.runs(process) for room in process.log.open_rooms()]

    def abort(self, n: int, m: int, k: int) -> None:
        if rooms := self.open_rooms():
            newest = [one for one in rooms if one[2] == self.next_room - 1]
            process, books, room = pick(newest if newest and k % 3 else rooms, n)
            books.abort(room)
            process.session.abort(room, GONE, self.network.now_s)
            process.step()
            if m % 3 == 0:  # the news of it is faster than what was said before
                for queue in self.network.queues():
                    self.network.overtake(*queue)

    # ---- the network and the backend --------------------------------------------------------------------------------------

    def frame(self, n: int, m: int, k: int) -> None:
        if queues := self.network.queues():
            what = pick(("deliver", "deliver", "deliver", "overtake", "overtake", "drop", "repeat", "corrupt"), m)
            queue = pick(queues, n)
            if what == "corrupt":
                self.network.corrupt(*queue, k / 1000)
            else:
                getattr(self.network, what)(*queue)

    def pump(self, *_: int) -> None:
        self.network.pump()

    def end_write(self, n: int, m: int, k: int) -> None:
        if writes := self.faults.in_flight:
            how = pick(("", "", "", "", "partial", "error", "cut", "corrupt" if self.settings.digest else ""), m)
            self.faults.finish(pick(writes, n), Decision(how, k / 1000))
            self.step_all()

    def end_writes(self, *_: int) -> None:
        self.faults.finish_all()
        self.step_all()

    def refuse_post(self, n: int, m: int, k: int) -> None:
        """The next one of a prefill node."""
        backend = pick(self.prefills, n)[0].backend
        assert isinstance(backend, FaultyBackend)
        self.faults.script(backend.site, "refuse")

    def advance(self, n: int, m: int, k: int) -> None:
        self.network.advance(pick((0.1, 0.5, 0.5, 1.0, 1.0, 2.0, 35.0), n))
        if m % 3:
            self.network.pump()

    # ---- breaks, stops and death -------------------------------------------------------------------------------------------

    def cut(self, n: int, m: int, k: int) -> None:
        """A connection ends and both sides notice, or D alone does; or it falls silent."""
        if connections := self.network.open_connections():
            for step in pick(("cut", "silence cut", "silence"), m).split():
                getattr(self.network, step)(pick(connections, n))
            if k % 3:
                self.network.pump()

    def freeze(self, n: int, m: int, k: int) -> None:
        process, _ = pick(self.nodes(), n)
        if self.runs(process):
            self.network.freeze(process, in_hand=k % 2 == 0)

    def thaw(self, n: int, m: int, k: int) -> None:
        if frozen := self.frozen():
            process, books = pick(frozen, n)

            def commands() -> None:
                """What its scheduler had asked for before the stop."""
                for room in list(books.at_work):
                    for _ in range(k % 6):
                        self.work_on(process, books, room, 1 + k % 3, step=False)

            self.network.thaw(process, m % 5, commands)

    def stop(self, n: int, m: int, k: int) -> None:
        """A process stands still for a while, in which the others find out."""
        self.freeze(n, m, k)
        for _ in range(1 + m % 10):
            self.network.advance(0.5)
            self.network.pump()
        if k % 2:
            self.end_kernels()
        self.thaw(n, m // 10, k // 2)

    def frozen(self) -> list[tuple[SimPrefill | SimDecode, Books]]:
        return [(process, books) for process, books in self.nodes() if process.alive and process.frozen_at_s is not None]

    def kill(self, n: int, m: int, k: int) -> None:
        how = pick(("prefill", "prefill", "prefill for a while", "decode"), m)
        if how == "decode":
            decode = n % len(self.decodes)
            self.network.kill(self.decodes[decode][0])
            self.decodes[decode] = self.new_decode()
            return
        port = n % len(self.prefills)
        self.killed.add(self.prefills[port][0].address)
        was_alive = self.prefills[port][0].alive
        self.network.kill(self.prefills[port][0])
        if how == "prefill" or not was_alive:
            self.prefills[port] = self.new_prefill(port)

    # ---- what must hold ----------------------------------------------------------------------------------------------------

    @invariant()
    def rules_hold(self) -> None:
        for process, books in self.nodes() if hasattr(self, "network") else []:
            if process.alive:
                books.pages.check()
                if process.frozen_at_s is None:
                    late = [room for room, deadline_s in books.unanswered.items() if deadline_s <= self.network.now_s]
                    assert not late, f"rooms {late} of {process.incarnation} were not answered by their deadline"

    def step_all(self) -> None:
        for process in self.network.running():
            process.step()

    def teardown(self) -> None:
        if not hasattr(self, "network") or sys.exc_info()[0] is not None:  # what went wrong is known already
            return
        for process, _ in self.frozen():
            self.network.thaw(process, 100)
        for _ in range(MAX_STEPS_TO_QUIET):
            self.faults.finish_all()
            self.end_kernels()
            self.network.pump()
            for process, books, room in self.at_work():
                self.work_on(process, books, room, 1)
            if not self.open_rooms() and not self.held():
                break
            self.network.advance(0.5)
            self.rules_hold()
        assert not self.open_rooms(), [(process.incarnation, room, process.log.by_room[room]) for process, _, room in self.open_rooms()]
        assert self.held() == {}
        for process, books in self.nodes():
            if process.alive:
                books.pages.check()
                assert sorted(books.pages.free) == list(range(NUM_PAGES))
                assert process.backend.tickets.num_open == process.memory.tickets.num_open == 0
                type(self).num_delivered += sum(isinstance(events[-1], Delivered) for events in process.log.by_room.values())
        self.both_sides_agree()

    def held(self) -> dict[str, int]:
        """What is left in any table of a living process."""
        tables: dict[str, Any] = {}
        for process in self.network.processes():
            session: Any = process.session
            kept = {"rooms": session._rooms, "timers": session._timers}
            if isinstance(process, SimPrefill):
                kept |= {"tickets": session._writes._tickets, "held back": session._writes._held_back, "fences": session.links._fences}
            else:
                kept |= {"withdrawals": session._withdrawals}
            tables |= {f"{process.incarnation} {name}": len(table) for name, table in kept.items() if len(table)}
        return tables

    def both_sides_agree(self) -> None:
        """What D took for delivered, P had delivered, if it is still the P that D met."""
        lived = [process for process, _ in self.prefills if process.address not in self.killed]
        ends = {room: process.log.by_room[room][-1] for process in lived for room in process.log.by_room}
        for process, _ in self.decodes:
            for room, events in process.log.by_room.items():
                if isinstance(events[-1], Delivered) and room in ends:
                    assert ends[room] == Delivered(room)


class EveryWriteWaits(Faults):
    """Nothing is drawn: a write is stuck until a rule ends it."""

    def _draw(self, site: str) -> Decision:
        return Decision("stuck")


def run_model(caplog: pytest.LogCaptureFixture, **options: Any) -> None:
    caplog.set_level(logging.CRITICAL, logger="kvtransfer")  # losses by the thousand
    Transfers.num_examples = Transfers.num_delivered = 0
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    common = {"stateful_step_count": STEPS, "deadline": None, "database": None, "suppress_health_check": checks}
    run_state_machine_as_test(Transfers, settings=hypothesis_settings(**common, **options))


@pytest.mark.timeout(0 if RANDOM_EXAMPLES else 300)
def test_the_rules_hold_under_every_interleaving(caplog: pytest.LogCaptureFixture) -> None:
    run_model(caplog, max_examples=EXAMPLES, derandomize=not RANDOM_EXAMPLES, print_blob=True)
    print(f"{Transfers.num_examples} examples, {Transfers.num_delivered} deliveries in them")
    assert Transfers.num_examples >= EXAMPLES
    assert Transfers.num_delivered > EXAMPLES / 10  # the model does transfer


BROKEN = {
    "pages not ready": ("kvtransfer.outgoing.Batch.is_ready", lambda batch: True),  # P sends what it has not computed
    # D takes pages back that P may write
    "no fence": ("kvtransfer.link_dial.DialledLinks._fence", lambda links, at, fence, now_s: NO_FENCE),
}
if RANDOM_EXAMPLES:  # takes thousands of examples: P writes to whoever may have dropped it
    BROKEN["no lease"] = ("kvtransfer.lease.Lease.holds", lambda lease, now_s: lease._ends_s > 0.0)


@pytest.mark.parametrize(("broken", "instead"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_on_purpose_is_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: str, instead: Callable[..., object]
) -> None:
    """The model itself: it sees what it is there for."""
    monkeypatch.setattr(broken, instead)
    with pytest.raises((AssertionError, IllegalTransition)):
        run_model(caplog, max_examples=10_000, derandomize=True, phases=[Phase.generate])  # one suffices


def test_the_model_delivers_when_nothing_goes_wrong() -> None:
    """The model itself: without mishap every room is delivered."""
    model = Transfers()
    model.start(False, False, 8, 2, 2)
    for room in range(1, 9):
        request = Request(room, 1 + room, room % 2, b"same", 60.0)
        model.expect(request, room % 2, room // 2 % 2)
        model.offer(request, room % 2, room // 2 % 2)
    model.teardown()
    for process in model.network.processes():
        assert process.log.by_room
        assert all(isinstance(events[-1], Delivered) for events in process.log.by_room.values())
