"""Incremental decoding equals one-shot decoding, for every kind of decoder and any token ids."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import CONFIG, CORPUS, KINDS, byte_level, llama2_like, wordpiece, write_checkpoint

from common.server.incremental import CleanUp, Vocabulary
from common.server.tokenizer import Tokenizer, clean_up_spaces


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    plain = {kind: Tokenizer.from_dir(write_checkpoint(root / kind, build())) for kind, build in KINDS.items()}
    config = {**CONFIG, "clean_up_tokenization_spaces": True}
    cleaning = {
        f"{kind}_cleaned": Tokenizer.from_dir(write_checkpoint(root / f"{kind}_cleaned", KINDS[kind](), config))
        for kind in ("wordpiece", "metaspace")
    }
    return {**plain, **cleaning}


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    decoder = Vocabulary(tokenizer).decoder(skip_special_tokens)
    return [*(decoder.feed(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("kind", [*sorted(set(KINDS) - {"byte_level_in_sequence"}), "wordpiece_cleaned", "metaspace_cleaned"])
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_pieces_of_random_ids_make_the_one_shot_text(
    kind: str, data: st.DataObject, skip_special_tokens: bool, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens)) == tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", ["llama2_like", "gemma_like"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_runs_of_byte_tokens_decide_together(kind: str, data: st.DataObject, tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind[kind]
    characters = st.text("aé日🙂\n", max_size=3).map(lambda text: [tokenizer.token_id(f"<0x{byte:02X}>") for byte in text.encode()])
    others = st.sampled_from(["▁", "▁the", "�", "</s>", "日"]).map(lambda token: [tokenizer.token_id(token)])
    stray = st.sampled_from([0x41, 0xE4, 0xBD, 0xFF]).map(lambda byte: [tokenizer.token_id(f"<0x{byte:02X}>")])
    ids = [token_id for part in data.draw(st.lists(st.one_of(characters, others, stray), max_size=12)) for token_id in part]
    assert "".join(pieces_of(tokenizer, ids, True)) == tokenizer.decode(ids, True)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=50, deadline=None)
@given(text=st.one_of(st.text(max_size=40), st.sampled_from(CORPUS)))
def test_pieces_of_encoded_text_make_the_text_and_hold_no_partial_character(kind: str, text: str, tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, True)
    assert "".join(pieces) == tokenizer.decode(ids, True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_printed_with_its_last_byte(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    characters = [next(c for c, byte in _alphabet().items() if byte == value) for value in "🦊".encode()]
    ids = [tokenizer.token_id(character) for character in characters]
    assert pieces_of(tokenizer, [i for i in ids if i is not None], True) == ["", "", "", "🦊", ""]


def test_an_incomplete_last_character_is_flushed_as_in_one_shot(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("x🦊", add_special_tokens=False)[:-1]
    pieces = pieces_of(tokenizer, ids, True)
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == tokenizer.decode(ids) == "x\ufffd"


@settings(max_examples=300, deadline=None)
@given(raw=st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xA0, 0xF0, 0x90, 0x9F, 0xF4, 0xF5, 0xFF]), max_size=12))
def test_ill_formed_utf8_is_replaced_as_in_one_shot(raw: list[int], tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    by_byte = {byte: tokenizer.token_id(character) for character, byte in _alphabet().items()}
    ids = [token_id for byte in raw if (token_id := by_byte[byte]) is not None]
    assert "".join(pieces_of(tokenizer, ids, True)) == tokenizer.decode(ids)


@settings(max_examples=1000, deadline=None)
@given(parts=st.lists(st.sampled_from([" ", "'", "n", "t", ".", "m", "ve", "x", "xyz", " ' ", "re", "s", ",", "!", "?"]), max_size=25))
def test_clean_up_of_pieces_equals_clean_up_of_the_text(parts: list[str]) -> None:
    class Spoken:
        def feed(self, token_id: int) -> str:
            return parts[token_id]

        def flush(self) -> str:
            return ""

    cleaner = CleanUp(Spoken())
    pieces = [*(cleaner.feed(position) for position in range(len(parts))), cleaner.flush()]
    assert "".join(pieces) == clean_up_spaces("".join(parts))


@pytest.mark.parametrize("build", [byte_level, llama2_like, wordpiece])
def test_cost_of_a_token_does_not_grow_with_the_text(build: object, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_checkpoint(tmp_path, build()))  # type: ignore[operator]
    decoded: list[int] = []
    vocabulary = Vocabulary(tokenizer)
    decode_raw = tokenizer.decode_raw
    tokenizer.decode_raw = lambda ids: (decoded.append(len(ids)), decode_raw(ids))[1]  # type: ignore[method-assign]
    decoder = vocabulary.decoder(True)
    ids = tokenizer.encode("the a hello s the " * 500)
    for token_id in ids:
        decoder.feed(token_id)
    decoder.flush()
    assert len(ids) > 1000
    assert sum(decoded) <= 6 * len(ids)
    assert max(decoded, default=0) <= 4


def test_a_long_run_of_ill_formed_bytes_costs_linear_time(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["llama2_like"]
    stray = tokenizer.token_id("<0xFF>")
    assert stray is not None
    started_s = time.process_time()
    assert "".join(pieces_of(tokenizer, [stray] * 50_000, True)) == "\ufffd" * 50_000
    assert time.process_time() - started_s < 5


def _alphabet() -> dict[str, int]:
    from common.server.incremental import BYTE_OF_CHARACTER

    return BYTE_OF_CHARACTER
