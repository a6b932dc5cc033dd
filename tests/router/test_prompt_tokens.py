"""A prompt's tokens in the router are the nodes' own, however they are found."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_node import write_model_dir
from text_tokenizers import KINDS, write_checkpoint
from tokenizers import AddedToken, pre_tokenizers

from common.server.openai_schema import RequestParser
from common.server.tokenizer import Tokenizer
from common.server.tokenizer_manager import Limits, TokenizerManager
from router import prompt_tokens
from router.exact_index import ExactPrompt, pack
from router.prompt_tokens import PieceCache, PromptReader
from router.splice import read_head

TURNS = [
    {"role": "developer", "content": "Be brief, the user is in a hurry."},
    {"role": "user", "content": [{"type": "text", "text": "What's"}, {"type": "text", "text": " 1234567890 in words?\n"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "ελληνικά <|im_end|> 日本語 🙂", "tool_call_id": "1"},
    {"role": "assistant", "content": "The lazy dog.", "reasoning_content": "hm"},
    {"role": "user", "content": "  and  again? "},
]
BODIES: list[dict[str, Any]] = [
    *({"messages": TURNS[:number]} for number in (1, 2, 4, 6)), {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
    {"prompt": "The quick brown fox"}, {"prompt": "<|im_start|>user\nhi<|im_end|>"}, {"prompt": ["one text"]}, {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6]]},
]  # fmt: skip


def node_tokens(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    """As a node does it."""
    parser = RequestParser("m", bootstrap_port=1)
    request = (parser.parse_chat if "messages" in body else parser.parse_completion)(json.dumps(body).encode())
    manager = TokenizerManager.__new__(TokenizerManager)
    manager._tokenizer = tokenizer
    (ids,) = manager._tokenise(request, Limits(10_000, 10_000, 1000, 8, False))
    return ids


@pytest.fixture(params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    template = (Path(__file__).parents[1] / "fixtures/chat_templates/qwen3.jinja").read_text("utf-8")
    write_checkpoint(tmp_path, KINDS[request.param](), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template})
    return Tokenizer.from_dir(tmp_path)


@pytest.fixture
def reader(tokenizer: Tokenizer) -> Iterator[PromptReader]:
    made = PromptReader(tokenizer)
    yield made
    made.close()


def head_of(body: dict[str, Any]) -> Any:
    return read_head(json.dumps(body).encode())


async def tokens(reader: PromptReader, body: dict[str, Any]) -> bytes | None:
    prompt = await reader.read(head_of(body), text=True)
    return None if prompt is None else prompt.packed


@pytest.mark.parametrize("inline_characters", [0, 1000])
async def test_tokens_are_the_nodes(
    reader: PromptReader, tokenizer: Tokenizer, inline_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn by turn, so that each conversation finds pieces of the one before it; here and in the thread."""
    monkeypatch.setattr(prompt_tokens, "INLINE_CHARACTERS", inline_characters)
    for body in (*BODIES, *BODIES):
        found = await tokens(reader, body)
        if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int):
            assert found is None  # several prompts go to one pair: none of them decides
        else:
            assert found == pack(node_tokens(tokenizer, body)), body


@pytest.mark.parametrize("kind", ["the first word only has a space before it", "special tokens eat the space behind them"])
async def test_a_conversation_is_not_cut_where_its_pieces_would_be_other_tokens(kind: str, tmp_path: Path) -> None:
    backend = KINDS["metaspace"]()
    if kind.startswith("special"):
        backend.add_special_tokens([AddedToken("<|im_start|>", normalized=False, special=True, rstrip=True)])
        template = "{% for message in messages %}<|im_start|> {{ message.content }}<|im_end|>{% endfor %}"
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        template = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    tokenizer = Tokenizer.from_dir(write_checkpoint(tmp_path, backend, {"chat_template": template}))
    reader = PromptReader(tokenizer)
    for body in BODIES[:4]:
        assert await tokens(reader, body) == pack(node_tokens(tokenizer, body))
    reader.close()


async def test_a_further_turn_tokenises_its_own_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PromptReader.from_dir(str(write_model_dir(tmp_path)))
    new: list[str] = []
    encode = reader._encode
    monkeypatch.setattr(reader, "_encode", lambda pieces, special: new.extend(pieces) or encode(pieces, special))
    messages = [{"role": "user", "content": "first words"}]
    await tokens(reader, {"messages": messages})
    new.clear()
    await tokens(reader, {"messages": [*messages, {"role": "assistant", "content": "an answer"}, {"role": "user", "content": "more"}]})
    assert new == ["assistant\nan answer", "user\nmore"]
    reader.close()


@pytest.mark.parametrize(
    "body",
    [
        {}, {"messages": []}, {"messages": "hi"}, {"messages": [3]}, {"messages": None}, {"messages": [{"role": "user", "content": "refuse me"}]},
        {"prompt": None}, {"prompt": 3}, {"prompt": {"a": 1}}, {"prompt": [1, "a"]}, {"prompt": [-1]}, {"prompt": [1 << 40]},
        {"messages": [{"role": "user", "content": "x"}], "tools": 3},
        *({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}} for name in ("messages", "self", "tools")),
    ],
)  # fmt: skip
async def test_what_a_node_would_refuse_has_no_tokens(tmp_path: Path, body: dict[str, Any]) -> None:
    reader = PromptReader.from_dir(str(write_model_dir(tmp_path)))
    assert await tokens(reader, body) is None
    reader.close()


async def test_text_is_left_alone_when_it_is_not_wanted_or_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PromptReader.from_dir(str(write_model_dir(tmp_path)))
    assert await reader.read(head_of({"prompt": "a text"}), text=False) is None
    assert await reader.read(head_of({"messages": TURNS}), text=False) is None
    assert isinstance(await reader.read(head_of({"prompt": [1, 2]}), text=False), ExactPrompt)
    monkeypatch.setattr(prompt_tokens, "INLINE_CHARACTERS", 10)
    monkeypatch.setattr(prompt_tokens, "MAX_CHARACTERS", 100)
    assert await tokens(reader, {"prompt": "x" * 101}) is None
    monkeypatch.setattr(prompt_tokens, "MAX_WAITING", 2)
    found = await asyncio.gather(*(tokens(reader, {"prompt": f"{number} eleven characters"}) for number in range(5)))
    assert [ids is None for ids in found] == [False, False, True, True, True]
    assert reader.num_skipped == 4
    reader.close()


def test_the_cache_of_pieces_is_bounded() -> None:
    cache = PieceCache(2000)
    for number in range(100):
        cache.put(f"piece {number}", bytes(40))
        assert cache.get("piece 0") is not None  # used all the time, so never the oldest
        assert cache.nbytes <= 2000
    assert cache.get("piece 99") == bytes(40)
    assert cache.get("piece 50") is None


def test_a_router_without_kv_events_loads_no_tokenizer() -> None:
    command = "import sys, router.main; print([name for name in ('tokenizers', 'router.prompt_tokens', 'torch') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"
