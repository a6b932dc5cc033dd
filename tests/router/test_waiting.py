"""Who goes next: laws of order, fairness, and of who makes way."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from router.keys import PRIORITIES, Client
from router.waiting import STEP_S, WaitingRoom


@dataclass(eq=False)
class Guest:
    client: Client
    arrived_s: float
    priority: int = 0
    name: str = field(default="")


ALICE, BOB, CAROL = Client("alice"), Client("bob"), Client("carol")


def room_of(*guests: Guest) -> WaitingRoom[Guest]:
    room: WaitingRoom[Guest] = WaitingRoom()
    for guest in guests:
        room.add(guest)
    return room


def order(room: WaitingRoom[Guest], now_s: float = 100.0) -> list[str]:
    return [room.take_next(now_s).name for _ in range(len(room))]


def test_equals_go_in_the_order_of_their_coming() -> None:
    assert order(room_of(*(Guest(ALICE, float(n), name=str(n)) for n in range(5)))) == list("01234")


def test_a_step_of_priority_is_worth_a_step_of_waiting() -> None:
    room = room_of(Guest(ALICE, 0.0, 3, "background"), Guest(ALICE, 2.9 * STEP_S, 0, "soon after"), Guest(ALICE, 3.1 * STEP_S, 0, "too late"),
                   Guest(ALICE, 3.2 * STEP_S, -1, "urgent"))  # fmt: skip
    assert order(room) == ["urgent", "soon after", "background", "too late"]


def test_clients_take_turns_however_many_they_are() -> None:
    many = [Guest(ALICE, 0.0, name="a") for _ in range(1000)]
    room = room_of(*many, *(Guest(BOB, 1.0, name="b") for _ in range(3)), Guest(CAROL, 1.0, name="c"))
    assert [room.take_next(2.0).name for _ in range(9)] == list("abcababaa")


def test_a_client_of_better_priority_goes_first_but_not_for_ever() -> None:
    """One that always has more waits its steps between turns of the other."""
    room = room_of(Guest(ALICE, 0.0, 5, "background"))
    now_s, turns = 0.0, 0
    while True:
        room.add(Guest(BOB, now_s, 0, "b"))
        if room.take_next(now_s).name == "background":
            break
        turns, now_s = turns + 1, now_s + 0.25
    assert now_s == 5 * STEP_S
    assert turns == 20


def test_within_a_client_an_old_request_takes_the_turn_that_a_better_one_earns() -> None:
    room = room_of(Guest(ALICE, 0.0, 4, "old"), Guest(ALICE, 9.0, 0, "new"), Guest(BOB, 9.0, 2, "other"))
    assert order(room, 9.0) == ["old", "new", "other"]


def test_who_fills_the_room_makes_way_for_who_has_fewer() -> None:
    room = room_of(*(Guest(ALICE, float(n), name=str(n)) for n in range(4)), Guest(BOB, 5.0, name="b"))
    displaced = room.displaced_by(Guest(CAROL, 9.0))
    assert displaced is not None
    assert displaced.name == "3"
    displaced = room.displaced_by(Guest(BOB, 9.0))
    assert displaced is not None
    assert displaced.name == "3"
    room.remove(displaced)
    room.add(Guest(BOB, 9.0))
    assert room.displaced_by(Guest(BOB, 10.0)) is None  # 3 and 2: as even as can be
    assert room.displaced_by(Guest(ALICE, 10.0)) is None
    assert room.displaced_by(Guest(CAROL, 10.0, 1)) is None  # is no better than they


def test_background_work_makes_way_unless_it_has_waited_its_steps() -> None:
    room = room_of(Guest(ALICE, 0.0, 10, "first"), Guest(ALICE, 1.0, 10, "last"), Guest(ALICE, 1.0, 0))
    displaced = room.displaced_by(Guest(ALICE, 5.0, 0))
    assert displaced is not None
    assert displaced.name == "last"
    assert room.displaced_by(Guest(ALICE, 11.0, 0)) is None
    assert room.displaced_by(Guest(ALICE, 5.0, 10)) is None


def test_an_empty_room_has_nobody_to_displace() -> None:
    assert room_of().displaced_by(Guest(ALICE, 0.0)) is None


def test_how_many_go_before_counts_one_of_each_other_client_a_turn() -> None:
    room = room_of(*(Guest(ALICE, 0.0) for _ in range(10)), *(Guest(BOB, 0.0) for _ in range(2)), Guest(CAROL, 0.0, 5))
    assert room.num_ahead(ALICE, 0) == 12
    assert room.num_ahead(BOB, 0) == 2 + 3
    assert room.num_ahead(CAROL, 0) == 2
    assert room.num_ahead(CAROL, 5) == 1 + 2 + 2
    assert room.num_ahead(ALICE, -1) == 0


@given(st.lists(st.tuples(st.sampled_from([ALICE, BOB, CAROL]), st.sampled_from(PRIORITIES), st.floats(0, 3)), max_size=60))
def test_all_are_served_and_none_is_overtaken_within_its_client_beyond_its_steps(steps: list[tuple[Client, int, float]]) -> None:
    """Two come for each that goes; then the room empties."""
    room: WaitingRoom[Guest] = WaitingRoom()
    now_s, came, waiting = 0.0, [], set[Guest]()

    def take() -> None:
        taken = room.take_next(now_s)
        waiting.remove(taken)
        for other in waiting:
            if other.client is taken.client:
                assert taken.arrived_s <= other.arrived_s + (other.priority - taken.priority) * STEP_S + 1e-9

    for number, (client, priority, pause_s) in enumerate(steps):
        now_s += pause_s
        came.append(Guest(client, now_s, priority))
        room.add(came[-1])
        waiting.add(came[-1])
        if number % 2:
            take()
    while room:
        now_s += 1.0
        take()
    assert not waiting
