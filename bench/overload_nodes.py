"""A prefill and a decode node that compute nothing and take the time of it, for overload.py.

    python bench/overload_nodes.py --tokens-per-s 8000 --rows 64 --tpot 0.02

One line of JSON on standard output has both ports; it ends when standard input does. A request waits for a row of the decode node, which reserves
pages before it makes its offer, then its prompt is computed, one after another, then its tokens come. A client that leaves frees what it had.
Prompts are token ids.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field

from aiohttp import web

MODEL = "mock"
FACTS = {
    "served_model_name": MODEL, "fingerprint": "f", "dtype": "float32", "kv_cache_dtype": "float32", "page_size": 16, "protocol_version": 1,
    "context_length": 1 << 20, "transfer_backend": "tcp", "cluster_key_id": "none",
}  # fmt: skip


@dataclass(slots=True)
class Room:
    offered: asyncio.Event = field(default_factory=asyncio.Event)
    computed: asyncio.Event = field(default_factory=asyncio.Event)


class Pair:
    def __init__(self, tokens_per_s: float, rows: int, tpot_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._num_rows = rows
        self._tpot_s = tpot_s
        self._rows = asyncio.Semaphore(rows)
        self._computing = asyncio.Lock()  # first come, first served
        self.rooms: dict[int, Room] = {}
        self.num_open = 0

    def app(self, role: str) -> web.Application:
        async def ready(_: web.Request) -> web.Response:
            return web.json_response({"status": "ready"})

        async def info(_: web.Request) -> web.Response:
            running = min(self.num_open, self._num_rows)
            load = {"running": running, "waiting": self.num_open - running} if role == "decode" else {}
            port = {"bootstrap_port": 1} if role == "prefill" else {}
            return web.json_response({**FACTS, "role": role, "max_running_requests": self._num_rows, **load, **port})

        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.get("/ready", ready), web.get("/server_info", info)])
        app.add_routes([web.post("/v1/completions", self._prefill if role == "prefill" else self._decode)])
        return app

    async def _prefill(self, request: web.Request) -> web.Response:
        body = await request.json()
        room = self.rooms.setdefault(body["bootstrap_room"], Room())
        await room.offered.wait()
        async with self._computing:
            await asyncio.sleep(len(body["prompt"]) / self._tokens_per_s)
        room.computed.set()
        return web.json_response({"object": "text_completion", "choices": [], "usage": {"prompt_tokens": len(body["prompt"])}})

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = body["bootstrap_room"]
        room = self.rooms.setdefault(number, Room())
        self.num_open += 1
        try:
            async with self._rows:
                room.offered.set()
                await room.computed.wait()
                return await self._stream(request, body["max_tokens"])
        finally:
            self.num_open -= 1
            del self.rooms[number]

    async def _stream(self, request: web.Request, num_tokens: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(num_tokens):
            reason = "length" if number + 1 == num_tokens else None
            event = {"object": "text_completion", "choices": [{"index": 0, "text": "tok ", "finish_reason": reason}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if reason is None:
                await asyncio.sleep(self._tpot_s)
        await response.write(b"data: [DONE]\n\n")
        return response


async def serve(pair: Pair) -> None:
    ports = {}
    runners = {role: web.AppRunner(pair.app(role), handler_cancellation=True, access_log=None) for role in ("prefill", "decode")}
    for role, runner in runners.items():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        ports[role] = runner.addresses[0][1]
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for runner in runners.values():
        await runner.cleanup()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--tokens-per-s", type=float, required=True, help="rate of the prefill node")
    flags.add_argument("--rows", type=int, required=True, help="of the decode node")
    flags.add_argument("--tpot", type=float, required=True, help="s a token")
    chosen = flags.parse_args()
    asyncio.run(serve(Pair(chosen.tokens_per_s, chosen.rows, chosen.tpot)))
