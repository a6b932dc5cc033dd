"""Every (state, event) pair of every table, against tables written here a second time; and the machine and timers themselves."""

import itertools
import math
from enum import Enum
from typing import Any

import pytest

from kvtransfer.link_accept import ACCEPT_TABLE, AcceptEvent, AcceptState
from kvtransfer.link_dial import DIAL_TABLE, DialEvent, DialState
from kvtransfer.machine import IllegalTransition, Machine, Table, from_each
from kvtransfer.receiver import RECEIVER_TABLE, ReceiverEvent, ReceiverState
from kvtransfer.sender_room import SENDER_TABLE, SenderEvent, SenderState
from kvtransfer.timers import Timers

# state: {event: next state}; what is not here is illegal
SENDER: dict[str, dict[str, str]] = {
    "NEW": {"EXPECT": "AWAIT_OFFER", "OFFER": "PARKED"},
    "AWAIT_OFFER": {"OFFER": "WAITING", "FAIL": "DRAINING"},
    "PARKED": {"EXPECT": "WAITING", "FAIL": "DRAINING"},
    "WAITING": {"PAGES": "COMPUTING", "TOKEN": "COMPUTING", "FAIL": "DRAINING"},
    "COMPUTING": {"PAGES": "COMPUTING", "TOKEN": "COMPUTING", "FINISH": "SENDING", "FAIL": "DRAINING"},
    "SENDING": {"DRAINED": "CLOSED", "FAIL": "DRAINING"},
    "DRAINING": {"PAGES": "DRAINING", "TOKEN": "DRAINING", "FINISH": "DRAINING", "FAIL": "DRAINING", "DRAINED": "CLOSED"},
    "CLOSED": {},
}
RECEIVER: dict[str, dict[str, str]] = {
    "PENDING": {"SEND": "OFFERED", "GIVE_UP": "CLOSED"},
    "OFFERED": {"TOKEN": "OFFERED", "DELIVER": "READY", "CLOSE": "CLOSED", "GIVE_UP": "QUARANTINE"},
    "READY": {},
    "QUARANTINE": {"TOKEN": "QUARANTINE", "DELIVER": "CLOSED", "CLOSE": "CLOSED", "GIVE_UP": "QUARANTINE", "FENCED": "CLOSED"},
    "CLOSED": {},
}
ACCEPT: dict[str, dict[str, str]] = {
    "FENCED": {"ADMIT": "UP", "REFUSE": "DOWN", "LOSE": "DOWN"},
    "UP": {"LOSE": "DOWN"},
    "DOWN": {},
}
DIAL: dict[str, dict[str, str]] = {
    "DOWN": {"DIAL": "CONNECTING"},
    "CONNECTING": {"ACK": "UP", "ACK_ALIAS": "ALIAS", "REFUSE": "REFUSED", "LOSE": "DOWN"},
    "UP": {"LOSE": "DOWN"},
    "ALIAS": {"LOSE": "DOWN"},
    "REFUSED": {"DIAL": "CONNECTING", "LOSE": "DOWN"},
}
TABLES: list[tuple[Table[Any, Any], type[Enum], type[Enum], dict[str, dict[str, str]]]] = [
    (SENDER_TABLE, SenderState, SenderEvent, SENDER),
    (RECEIVER_TABLE, ReceiverState, ReceiverEvent, RECEIVER),
    (ACCEPT_TABLE, AcceptState, AcceptEvent, ACCEPT),
    (DIAL_TABLE, DialState, DialEvent, DIAL),
]
PAIRS = [
    pytest.param(table, state, event, expected[state.name].get(event.name), id=f"{table.name}: {state.name} {event.name}")
    for table, states, events, expected in TABLES
    for state, event in itertools.product(states, events)
]


@pytest.mark.parametrize(("table", "state", "event", "expected"), PAIRS)
def test_every_pair_of_state_and_event(table: Table[Any, Any], state: Enum, event: Enum, expected: str | None) -> None:
    machine = Machine(table, state)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{table.name}: {event.name} may not happen in {state.name}"):
            machine.fire(event)
        assert machine.state is state
    else:
        assert machine.fire(event).name == expected
        assert machine.state.name == expected


@pytest.mark.parametrize(("table", "states", "events", "expected"), TABLES, ids=[table.name for table, *_ in TABLES])
def test_the_second_writing_names_every_state(table: Table[Any, Any], states: type[Enum], events: type[Enum], expected: dict[str, Any]) -> None:
    assert set(expected) == {state.name for state in states}
    assert len(table.transitions) == sum(len(row) for row in expected.values())


def test_from_each_gives_one_row_a_state() -> None:
    rows = from_each((DialState.UP, DialState.ALIAS), DialEvent.LOSE, DialState.DOWN)
    assert rows == {(DialState.UP, DialEvent.LOSE): DialState.DOWN, (DialState.ALIAS, DialEvent.LOSE): DialState.DOWN}


def test_timers_expire_in_order_of_time_and_once() -> None:
    timers: Timers[str] = Timers()
    assert timers.next_due_s() == math.inf
    timers.set("late", 3.0)
    timers.set("early", 1.0)
    assert timers.next_due_s() == 1.0
    assert timers.expired(0.5) == []
    assert timers.expired(3.0) == ["early", "late"]
    assert timers.expired(3.0) == []
    assert len(timers) == 0


def test_a_timer_set_again_or_cancelled_does_not_expire_at_its_old_time() -> None:
    timers: Timers[str] = Timers()
    timers.set("moved", 1.0)
    timers.set("moved", 5.0)
    timers.set("cancelled", 1.0)
    timers.cancel("cancelled")
    timers.cancel("unknown")
    assert timers.next_due_s() == 5.0
    assert timers.expired(4.0) == []
    timers.set("moved", 2.0)
    assert timers.expired(4.0) == ["moved"]
    assert timers.next_due_s() == math.inf
