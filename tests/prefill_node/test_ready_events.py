"""Pages leave P behind the step that fills them, where that is still under way: a kernel may be writing them."""

import numpy as np
from pd_nodes import PdNodes
from scheduler_harness import random_prompt

from kvtransfer.memory import MemoryFabric


def test_pages_wait_for_the_step_that_fills_them() -> None:
    prompt = random_prompt(np.random.default_rng(3), 37)
    fabric = MemoryFabric()
    with PdNodes() as nodes:
        prefill, decode = nodes.add("prefill", fabric.backend(), chunk=8, late=1000), nodes.add("decode", fabric.backend())
        rid = nodes.submit(prompt, 5)
        nodes.run(lambda: len(prefill.runner.extend_sizes) == 1)
        for _ in range(20):
            decode.scheduler.step()
            prefill.endpoint.poll()
        assert prefill.runner.under_way, "the step has not run"
        assert prefill.endpoint.stats()["transfer_posts_total"] == 0
        nodes.run(lambda: len(prefill.runner.extend_sizes) == 2)  # launching the second waits for the first
        nodes.wait(lambda: prefill.endpoint.stats()["transfer_bytes_written_total"] == 2 * 4 * 8)  # 2 pages of 4 int64
        assert prefill.runner.under_way, "the second has not run"
        nodes.run_until_answered(rid)
        decode.assert_right(rid, prompt, 5)
        nodes.run_until_idle()

