"""vLLM nodes that are as strict as vLLM 0.32 is with a body, and about whose KV is read.

Checked as there (vllm/entrypoints/openai/{chat_completion,completion}/protocol.py, vllm/sampling_params.py,
vllm/distributed/kv_transfer/kv_connector/v1/): types of known members, null where it is not allowed, options that exclude each other,
parameters of a KV transfer. Parked pages are read once, by a request for the same prompt. What vLLM would do wrong without a word (read pages
of another prompt, read them twice, leave them parked) is answered with status 500 here, and kept in `Parked.faults`.
"""

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from mock_node import DONE, EVENTS, WHOLE, MockNode, Received, Rooms

# Members that can get into no prompt; all others of the two legs must be the same.
SAMPLING = {
    "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos",
    "stop_sequences",
    "logprobs", "top_logprobs", "prompt_logprobs", "temperature", "top_p", "seed", "kv_transfer_params", "echo", "priority",
}  # fmt: skip
INTEGERS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "top_logprobs", "prompt_logprobs", "seed", "priority")
NULLABLE = {  # what may be null, by endpoint
    "/v1/chat/completions": {"max_tokens", "max_completion_tokens", "n", "top_logprobs", "prompt_logprobs", "seed", "stream", "logprobs"},
    "/v1/messages": {"stream"},
    "/v1/responses": {"max_output_tokens", "stream"},
    "/v1/completions": {"max_tokens", "max_completion_tokens", "top_logprobs", "prompt_logprobs", "seed", "stream", "echo", "logprobs"},
}
MESSAGE = {"role": "user", "content": "a"}
PULL_PARAMS = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size")

ONE_TOKEN = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
# What real nodes answer 400 (tests/peers/test_vllm.py) and the mock must: prefill legs of routers that change max_tokens and no more, bad requests.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "stream_options left": ("/v1/chat/completions", {"messages": [MESSAGE], **ONE_TOKEN, "stream": False, "stream_options": {"include_usage": True}}),
    "min_tokens left": ("/v1/chat/completions", {"messages": [MESSAGE], **ONE_TOKEN, "min_tokens": 5}),
    "min_tokens null": ("/v1/completions", {"prompt": "a", **ONE_TOKEN, "min_tokens": None}),
    "n null": ("/v1/completions", {"prompt": "a", **ONE_TOKEN, "n": None}),
    "no integer": ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}),
    "no tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    "no prompt": ("/v1/completions", {"prompt": ""}),
    "no messages": ("/v1/chat/completions", {"max_tokens": 1}),
    "no tools": ("/v1/chat/completions", {"messages": [MESSAGE], "tools": []}),
    "tool_choice alone": ("/v1/chat/completions", {"messages": [MESSAGE], "tool_choice": "required"}),
    "top_logprobs alone": ("/v1/chat/completions", {"messages": [MESSAGE], "top_logprobs": 2}),
    "prompt_logprobs streamed": ("/v1/completions", {"prompt": "a", "stream": True, "prompt_logprobs": 1}),
    "parameters that are none": ("/v1/completions", {"prompt": "a", "kv_transfer_params": [1]}),
}


class Refused(Exception):
    """status, message"""


@dataclass
class Parked:
    """Pages that prefill mocks hold for a reader, and what went wrong with them."""

    pages: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # engine id, request or transfer id -> what, and for which prompt
    faults: list[str] = field(default_factory=list)
    num_read: int = 0
    rooms: Rooms = field(default_factory=Rooms)


class MockVllm(MockNode):
    """`connector`: "nixl" or "mooncake". `parks`: whether a prompt's pages are kept at all; False: as after an abort."""

    def __init__(self, role: str, parked: Parked, connector: str = "nixl") -> None:
        super().__init__(role, parked.rooms)
        self.parked, self.connector, self.parks = parked, connector, True
        self.engine_id = f"engine-{id(self):x}"
        self.local_prompts: list[Any] = []  # that a decode node computed itself
        self._numbers = itertools.count()

    async def serve_well(self, request: Received) -> None:
        try:
            body = check_body(request)
            params = body.get("kv_transfer_params")
            if self.role == "prefill":
                await request.reply(200, json.dumps(self._prefill(body, params)).encode().replace(b'"1.50"', b"1.50"))
                return
            await self._decode(request, body, params)
        except Refused as refused:
            status, message = refused.args
            error = {"message": message, "type": "BadRequestError" if status == 400 else "InternalServerError", "param": None, "code": status}
            await request.reply(status, json.dumps({"error": error}).encode())
            return
        if not request.stream:
            await request.reply(200, WHOLE)
            return
        await request.head(200, "text/event-stream; charset=utf-8")
        for event in (*EVENTS, DONE):
            await request.chunk(event)
        await request.end()

    def _prefill(self, body: dict[str, Any], params: dict[str, Any] | None) -> dict[str, Any]:
        if not params or params.get("do_remote_decode") is not True or params.get("do_remote_prefill") is not False:
            raise self._fault(f"a prefill node computes for nobody: {params}")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit != 1 or body.get("stream") or (body.get("n") or 1) != 1 or body.get("logprobs") or body.get("best_of"):
            raise self._fault(f"a prefill node generates an answer: {body}")
        reply: dict[str, Any] = {"object": "text_completion", "choices": [], "kv_transfer_params": None}
        reply["usage"] = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
        if not self.parks:
            return reply
        # as if its first token were EOS, or a stop string
        stopped = not body.get("ignore_eos") or any(body.get(name) for name in ("stop", "stop_token_ids", "stop_sequences"))
        if self.connector == "mooncake":
            if "transfer_id" not in params or stopped:
                raise self._fault(f"pages are parked for no transfer: {params}, stopped {stopped}")
            self.parked.pages[self.engine_id, params["transfer_id"]] = {"prompt": prompt_of(body)}
            self.parked.rooms.of(params["transfer_id"]).set()
            return reply
        number = next(self._numbers)
        reply["kv_transfer_params"] = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[number, number + 1]], "remote_engine_id": self.engine_id,
            "remote_request_id": f"request-{number}", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            "remote_num_tokens": 5, "remote_blocks_expiry_time": None, "transfer_mode": "pull", "a_later_version": "1.50",
        }  # fmt: skip
        self.parked.pages[self.engine_id, f"request-{number}"] = {"prompt": prompt_of(body), "blocks": [[number, number + 1]]}
        return reply

    async def _decode(self, request: Received, body: dict[str, Any], params: dict[str, Any] | None) -> None:
        if not params:
            self.local_prompts.append(prompt_of(body))
            return
        if params.get("do_remote_prefill") is not True:
            raise self._fault(f"a decode node prefills for nobody: {params}")
        prompts = body.get("prompt")
        several = isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int)
        if several or (body.get("n") or 1) > 1 or body.get("prompt_logprobs"):
            raise self._fault("one prompt's pages for more than one reader")
        if self.connector == "mooncake":
            await self.parked.rooms.of(params["transfer_id"]).wait()
            key = (params["remote_engine_id"], params["transfer_id"])
        else:
            if not params.get("remote_block_ids") or any(params.get(name) is None for name in PULL_PARAMS):
                raise self._fault(f"the engine core dies of an assertion: {params}")
            if b'"a_later_version":1.50' not in request.body.replace(b" ", b""):
                raise self._fault("the parameters were changed on the way")
            if params.get("remote_prefill_cached_tokens") != 3:
                raise self._fault("the answer's usage counts what was read as cached")
            key = (params["remote_engine_id"], params["remote_request_id"])
        pages = self.parked.pages.pop(key, None)
        if pages is None or pages.get("blocks", params.get("remote_block_ids")) != params.get("remote_block_ids"):
            raise self._fault(f"pages that nobody keeps: {params}")
        if pages["prompt"] != prompt_of(body):
            raise self._fault(f"pages of another prompt: {pages['prompt']}, not {prompt_of(body)}")
        self.parked.num_read += 1

    def _fault(self, what: str) -> Refused:
        self.parked.faults.append(what)
        return Refused(500, what)

    async def _get(self, request: Received) -> None:
        answers: dict[str, Any] = {
            "/health": None,
            "/version": {"version": "0.32.0"},
            "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": 256}]},
        }
        if self.connector == "mooncake" and self.role == "prefill":  # its bootstrap server, on the same port
            answers["/query"] = {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}
        if request.path not in answers:
            await request.reply(404, b'{"detail":"Not Found"}')
            return
        answer = answers[request.path]
        await request.reply(self.ready_status if request.path == "/health" else 200, b"" if answer is None else json.dumps(answer).encode())


def check_body(request: Received) -> dict[str, Any]:
    """Raises Refused with what vLLM would say."""
    nullable = NULLABLE.get(request.path)
    if nullable is None:
        raise Refused(404, "Not Found")
    pairs: list[tuple[str, Any]] = json.loads(request.body, object_pairs_hook=list)
    body: dict[str, Any] = json.loads(request.body)
    if len(pairs) != len(body):  # its Rust front end refuses what Python's parser accepts
        raise Refused(400, "duplicate field")
    for name, value in body.items():
        if value is None and name in (*INTEGERS, "stream", "echo", "logprobs") and name not in nullable:
            raise Refused(400, f"{name}: Input should be valid, not null")
        if name in INTEGERS and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise Refused(400, f"{name}: Input should be a valid integer")
    check_options(request.path, body)
    return body


def check_options(path: str, body: dict[str, Any]) -> None:
    chat = path in ("/v1/chat/completions", "/v1/messages")
    limit = next((value for name in ("max_completion_tokens", "max_tokens") if (value := body.get(name)) is not None), None)
    wrong = {
        "`messages` is missing": chat and not body.get("messages"),
        "Either prompt or prompt_embeds must be provided and non-empty.": path == "/v1/completions" and not body.get("prompt"),
        "Stream options can only be defined when `stream=True`.": body.get("stream_options") and not body.get("stream"),
        "max_tokens must be at least 1": limit is not None and limit < 1 and not body.get("echo"),
        "min_tokens must be less than or equal to max_tokens": limit is not None and (body.get("min_tokens") or 0) > limit,
        "n must be at least 1": body.get("n") is not None and body["n"] < 1,
        "when using `top_logprobs`, `logprobs` must be set to true.": body.get("top_logprobs") and not body.get("logprobs"),
        "`prompt_logprobs` are not available when `stream=True`.": body.get("stream") and body.get("prompt_logprobs"),
        "`tools` must not be an empty array.": body.get("tools") == [],
        "When using `tool_choice`, `tools` must be set.": body.get("tool_choice") not in (None, "none") and not body.get("tools"),
        "kv_transfer_params: Input should be a valid dictionary": not isinstance(body.get("kv_transfer_params"), dict | None),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise Refused(400, message)


def prompt_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in SAMPLING}
