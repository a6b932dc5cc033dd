"""A decode node's status line may come before its first byte: the reply has begun, and the answer has not."""

import asyncio

import pytest
from mock_node import STREAM, WHOLE, Received
from router_harness import CHAT, rig


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prefill_legs_end_between_head_and_body_is_no_failure(stream: bool) -> None:
    async with rig() as made:
        prefill, decode = made.prefills[0], made.decodes[0]
        head_sent = asyncio.Event()

        async def head_first(received: Received) -> None:
            if stream:
                await received.head(200, "text/event-stream")
            else:
                await received.head(200, "application/json", length=len(WHOLE))
            head_sent.set()
            await prefill._rooms.of(received.room).wait()
            await asyncio.sleep(0.05)  # so that the prefill reply is read before; were it not, the test would pass
            if stream:
                await received.chunk(STREAM)
                await received.end()
            else:
                await received.write(WHOLE)

        async def after_the_head(received: Received) -> None:
            await head_sent.wait()
            await prefill.serve_well(received)

        prefill.behave, decode.behave = after_the_head, head_first
        answer = await made.client.post(CHAT, json={"stream": stream})
        assert answer.status_code == 200, answer.text
        assert len(decode.posts) == 1
