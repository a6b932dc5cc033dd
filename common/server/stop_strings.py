"""Where does the text end? Stop strings, found in text that arrives in pieces.

Every stop string keeps the length of its longest prefix that the text so far ends with (Knuth, Morris, Pratt 1977), so a character
is looked at once per stop string, however long these are, and a match is seen with its last character. The string that is complete
first wins; of several complete at the same character the longest, since it starts earliest. Text that may be the beginning of a
stop string is held back: exactly the longest of those prefixes, so nothing is held longer than needed and nothing is ever taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """text: what may be printed now. matched: the stop string that ended the text; nothing may follow it."""

    text: str
    matched: str | None = None


class StopStrings:
    """The stop strings of one request, and how much of each the text ends with."""

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(filter(None, stops), key=len, reverse=True)]  # longest first: it wins a tie
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> Scan:
        """Take the next piece of text."""
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(character)
            if matched is not None:
                self._held = ""
                return Scan(pending[: end if self._include_in_output else end - len(matched)], matched)
        num_held = max((automaton.num_matched for automaton in self._automata), default=0)
        num_free = len(pending) - num_held
        self._held = pending[num_free:]
        return Scan(pending[:num_free])

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        matched = None
        for automaton in self._automata:
            if automaton.advance(character) and matched is None:
                matched = automaton.stop
        return matched


class _Automaton:
    """One stop string. `num_matched`: length of its longest prefix that ends the text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0] * len(stop)  # of each prefix: the longest proper prefix that is also its suffix
        border = 0
        for position in range(1, len(stop)):
            while border and stop[position] != stop[border]:
                border = self._borders[border - 1]
            border += stop[position] == stop[border]
            self._borders[position] = border

    def advance(self, character: str) -> bool:
        """True when the stop string is complete with this character; it is not advanced after that."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self.stop[self.num_matched] == character
        return self.num_matched == len(self.stop)
