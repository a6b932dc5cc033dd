"""Which of the nodes that could serve a request does.

A policy is one function: from the candidates of one role (never empty, in turn: the first has waited longest) and what is known of the
request, it picks one, and says what it compared (for metrics). Among equals the first is picked, so that idle nodes take turns.
Registered by role under the name that --policy, --prefill-policy and --decode-policy take.

             prefill                                            decode
cost         least cost: what is queued there and what of this  emptiest, of those that have the pages for prompt and
             prompt its cache lacks, at its measured rate; the  expected answer (load.py: DecodeLoad.fullness)
             latter at a price when the fleet is busy (load.py)
cache_aware  longest known prefix, unless load is uneven        as cost
least_load   fewest tokens queued to be computed                fewest requests
power_of_two two drawn, the less loaded of them (Mitzenmacher)  likewise
round_robin, random
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence

from common.config import PolicyName
from router.ask import Ask
from router.node import Leg, Node

Hits = Mapping[Node, int]  # tokens of the prompt that a node is known to hold
Pick = tuple[Node, float]
Policy = Callable[[Sequence[Node], Ask, Hits], Pick]

# SGLang's router: its names and defaults (--cache-threshold 0.3, --balance-abs-threshold 64, --balance-rel-threshold 1.5; there load is
# requests in flight, answers included). Ours counts prompts that are not computed yet, of which a node has some tenth as many.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 8
BALANCE_REL_THRESHOLD = 1.5


def first_in_turn(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    return nodes[0], 0.0


def drawn(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    return random.choice(nodes), 0.0


def fewest_queued_tokens(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    node = min(nodes, key=lambda node: node.prefill_load.queued_tokens)
    return node, node.prefill_load.queued_tokens


def fewest_requests(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    node = min(nodes, key=lambda node: node.decode_load.num_requests + node.decode_load.num_others)
    return node, node.decode_load.num_requests + node.decode_load.num_others


def of_two(policy: Policy) -> Policy:
    """Two random choices get nearly all of what the best choice would bring, and many routers that know little do not all run to one node."""

    def pick(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
        return policy(nodes if len(nodes) < 2 else random.sample(nodes, 2), ask, hits)

    return pick


def least_cost(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    """Score: seconds; tokens while no rate is known."""
    num_tokens, cached = ask.num_tokens, hits.get
    best, least = nodes[0], math.inf
    for node in nodes:
        load = node.prefill_load
        cost = (load.num_queued + 1) * load.prompt_s + load.queued_tokens * load.token_s + (num_tokens - cached(node, 0)) * load.new_token_s
        if cost < least:
            best, least = node, cost
    return best, least


def longest_prefix(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    """Score: tokens known to be there, or queued where load decided."""
    queued = [node.prefill_load.num_queued for node in nodes]
    most, fewest = max(queued), min(queued)
    if most - fewest > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * fewest:
        return fewest_queued_tokens(nodes, ask, hits)
    num_hit_tokens = max((hits.get(node, 0) for node in nodes), default=0)
    if num_hit_tokens <= CACHE_THRESHOLD * ask.num_tokens:
        return fewest_queued_tokens(nodes, ask, hits)
    holders = [node for node in nodes if hits.get(node, 0) == num_hit_tokens]
    return fewest_queued_tokens(holders, ask, hits)[0], num_hit_tokens


def emptiest(nodes: Sequence[Node], ask: Ask, hits: Hits) -> Pick:
    """Score: fullness. When none has the pages, the one with the most room: its request waits least, and is seen to wait."""
    num_tokens = ask.num_tokens + ask.max_output_tokens
    best, least = None, math.inf
    for node in nodes:
        load = node.decode_load
        if load.fullness < least and load.room_tokens >= num_tokens:
            best, least = node, load.fullness
    if best is None:
        best = max(nodes, key=lambda node: node.decode_load.room_tokens)
        least = best.decode_load.fullness
    return best, least


POLICIES: dict[Leg, dict[PolicyName, Policy]] = {
    "prefill": {
        "cost": least_cost,
        "cache_aware": longest_prefix,
        "least_load": fewest_queued_tokens,
        "power_of_two": of_two(fewest_queued_tokens),
        "round_robin": first_in_turn,
        "random": drawn,
    },
    "decode": {
        "cost": emptiest,
        "cache_aware": emptiest,
        "least_load": fewest_requests,
        "power_of_two": of_two(fewest_requests),
        "round_robin": first_in_turn,
        "random": drawn,
    },
}
