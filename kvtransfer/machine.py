"""State machines as data (R10): a table of (state, event) -> state, and a machine that holds one state of it.

A pair that is not in the table is illegal: fire() raises IllegalTransition and changes nothing. What is done on a transition
belongs to the session that owns the machine; the table alone says what may happen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalTransition(Exception):
    """The event may not happen in this state. The machine is as it was."""


@dataclass(frozen=True)
class Table(Generic[S, E]):
    """`name` is for messages. States without a way out are final."""

    name: str
    transitions: Mapping[tuple[S, E], S]

    def after(self, state: S, event: E) -> S:
        try:
            return self.transitions[state, event]
        except KeyError:
            raise IllegalTransition(f"{self.name}: {event.name} may not happen in {state.name}") from None


def from_each(states: Iterable[S], event: E, target: S) -> dict[tuple[S, E], S]:
    """Rows of a table: `event` leads from each of `states` to `target`."""
    return {(state, event): target for state in states}


class Machine(Generic[S, E]):
    def __init__(self, table: Table[S, E], state: S) -> None:
        self._table = table
        self.state = state

    def fire(self, event: E) -> S:
        """The new state. Raises IllegalTransition and changes nothing."""
        self.state = self._table.after(self.state, event)
        return self.state
