"""Pages leave P behind an event of the runner, when it has events: a kernel may still be writing them."""

import numpy as np
from pd_nodes import PdNodes
from scheduler_harness import random_prompt

from kvtransfer.memory import MemoryFabric


class Event:
    def __init__(self, passed: list[bool]) -> None:
        self._passed = passed

    def query(self) -> bool:
        return self._passed[0]


def test_pages_wait_for_the_runners_events_and_token_1_does_not() -> None:
    prompt = random_prompt(np.random.default_rng(3), 37)
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = nodes.add("prefill", fabric.backend(), chunk=8), nodes.add("decode", fabric.backend())
        passed, num_events = [False], 0

        def ready_event() -> Event:
            nonlocal num_events
            num_events += 1
            return Event(passed)

        prefill.scheduler._ready_event = ready_event
        rid = nodes.submit(prompt, 5)
        nodes.run(lambda: len(decode.answers[rid].token_ids) == 1)
        for _ in range(20):
            nodes.step()
        assert num_events >= 2
        assert prefill.endpoint.stats()["transfer_posts_total"] == 0
        passed[0] = True
        nodes.run_until_answered(rid)
        decode.assert_right(rid, prompt, 5)
        nodes.run_until_idle()
