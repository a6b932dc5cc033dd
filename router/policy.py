"""Which of the nodes that could serve a request does.

A policy is one function: from the candidates of one role (never empty) and a turn number it picks one. Registered under the name
that --policy takes; it is asked once for the prefill node and once for the decode node. `turn` counts the requests of that role,
in an order that lets every prefill node meet every decode node.
"""

import random
from collections.abc import Callable, Sequence

from router.nodes import Node

Policy = Callable[[Sequence[Node], int], Node]

POLICIES: dict[str, Policy] = {}


def policy(name: str) -> Callable[[Policy], Policy]:
    def register(function: Policy) -> Policy:
        POLICIES[name] = function
        return function

    return register


@policy("round_robin")
def round_robin(nodes: Sequence[Node], turn: int) -> Node:
    return nodes[turn % len(nodes)]


@policy("random")
def random_choice(nodes: Sequence[Node], turn: int) -> Node:
    return random.choice(nodes)


@policy("least_load")
def least_load(nodes: Sequence[Node], turn: int) -> Node:
    """Fewest prompt bytes (prefill) or requests (decode) in flight; among equals, the next in turn."""
    start = turn % len(nodes)
    return min((*nodes[start:], *nodes[:start]), key=lambda node: node.load)
