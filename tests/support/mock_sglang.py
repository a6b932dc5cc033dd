"""SGLang nodes that are as strict as SGLang is about the three fields that join two legs.

Forms as in python/sglang/srt/managers/io_struct.py (GenerateReqInput) and entrypoints/openai/protocol.py: one value, or a list with one
for each prompt. A decode node computes no prompt itself. A room that is used twice stops both schedulers there; here it is status 500.
"""

import json
from typing import Any

from mock_node import DONE, EVENTS, WHOLE, MockNode, Received, Rooms

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
FIELDS = {"bootstrap_host": str, "bootstrap_port": int | None, "bootstrap_room": int}


class Refused(Exception):
    """What is wrong with a body."""


class MockSglang(MockNode):
    def __init__(self, role: str, rooms: Rooms, used: set[tuple[str, int]], info_path: str = "/server_info") -> None:
        """used: (role, room) of all requests so far. info_path: older releases have /get_server_info."""
        super().__init__(role, rooms)
        self.used, self.info_path = used, info_path
        self.info = {
            "model_path": "/models/tiny", "served_model_name": "tiny", "context_length": 256, "dtype": "auto", "kv_cache_dtype": "auto",
            "page_size": 1, "disaggregation_mode": role, "disaggregation_bootstrap_port": 8998, "version": "0.5.9",
            "disaggregation_transfer_backend": "mooncake", "max_running_requests": None, "status": "ready",
        }  # fmt: skip

    async def serve_well(self, request: Received) -> None:
        try:
            rooms = check_body(request)
        except Refused as refused:
            error = {"object": "error", "message": str(refused), "type": "BadRequest", "param": None, "code": 400}
            await request.reply(400, json.dumps(error).encode())
            return
        keys = {(self.role, room) for room in rooms}
        if len(keys) != len(rooms) or keys & self.used:
            await request.reply(500, b'{"object":"error","message":"a room is used twice","type":"InternalServerError","param":null,"code":500}')
            return
        self.used |= keys
        await super().serve_well(request) if request.path != GENERATE else await self._generate(request)

    async def _generate(self, request: Received) -> None:
        if self.role == "prefill":
            self._rooms.of(request.room).set()
        else:
            await self._rooms.of(request.room).wait()
        if request.stream:
            await request.head(200, "text/event-stream; charset=utf-8")
            for event in (*EVENTS, DONE):
                await request.chunk(event)
            await request.end()
        else:
            await request.reply(200, WHOLE)

    async def _get(self, request: Received) -> None:
        if request.path == "/health":
            await request.reply(self.ready_status, b"")
        elif request.path == self.info_path:
            await request.reply(200, json.dumps(self.info).encode())
        elif request.path == "/v1/models":
            await request.reply(200, b'{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"sglang","max_model_len":256}]}')
        else:
            await request.reply(404, b'{"detail":"Not Found"}')


def check_body(request: Received) -> list[int]:
    """The rooms, one a prompt. Raises Refused."""
    body: dict[str, Any] = json.loads(request.body)
    names = {CHAT: ("messages",), COMPLETIONS: ("prompt",), GENERATE: ("text", "input_ids")}.get(request.path)
    if names is None:
        raise Refused(f"no endpoint {request.path}")
    given = [body[name] for name in names if body.get(name) is not None]
    if len(given) != 1:
        raise Refused(f"exactly one of {names} is needed")
    several = request.path != CHAT and isinstance(given[0], list) and bool(given[0]) and not isinstance(given[0][0], int)
    for name, kind in FIELDS.items():
        values = body.get(name) if several else [body.get(name)]
        if not isinstance(values, list) or (several and len(values) != len(given[0])):
            raise Refused(f"{name}: {body.get(name)} for {len(given[0]) if several else 1} prompts")
        if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            raise Refused(f"{name}: {values}")
    rooms: list[int] = body["bootstrap_room"] if several else [body["bootstrap_room"]]
    if not all(0 <= room < 1 << 63 for room in rooms):
        raise Refused(f"bootstrap_room: {rooms}")
    return rooms
