"""Stop strings: the result equals searching the one-shot text after every token."""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import CONFIG, KINDS, write_checkpoint

from common.request import TextSpec
from common.server.detokenizer import IncrementalDetokenizer
from common.server.incremental import Vocabulary
from common.server.stop_strings import StopStrings
from common.server.tokenizer import Tokenizer

ALPHABET = "ab\n🙂"
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)
pieces_lists = st.lists(st.text(ALPHABET, max_size=5), max_size=12)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the earliest end, then earliest start; by definition, without cleverness."""
    found = [(start + len(stop), start, stop) for stop in stops if stop for start in range(len(text)) if text.startswith(stop, start)]
    return min(found, default=None)


@settings(max_examples=1000, deadline=None)
@given(pieces=pieces_lists, stops=stop_lists, include=st.booleans())
def test_pieces_equal_a_search_in_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    expected = first_match(text, tuple(stops))
    scanner, printed, num_pushed = StopStrings(stops, include), "", 0
    for piece in pieces:
        scan = scanner.push(piece)
        printed += scan.text
        num_pushed += len(piece)
        if scan.matched is not None:
            assert expected is not None
            end, start, stop = expected
            assert (scan.matched, printed) == (stop, text[: end if include else start])
            assert num_pushed - len(piece) < end <= num_pushed
            return
        longest_held = max((size for stop in stops for size in range(len(stop)) if text[:num_pushed].endswith(stop[:size])), default=0)
        assert printed == text[: num_pushed - longest_held]  # no more is held than may begin a stop string, and no less
    assert expected is None
    assert printed + scanner.flush() == text


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: Vocabulary(Tokenizer.from_dir(write_checkpoint(root / kind, build(), CONFIG))) for kind, build in KINDS.items()}


@pytest.mark.parametrize("kind", ["byte_level", "llama2_like", "gemma_like", "metaspace", "wordpiece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), include=st.booleans(), skip=st.booleans(), chunk_size=st.integers(1, 5))
def test_tokens_in_chunks_equal_a_search_in_the_one_shot_text(
    kind: str, data: st.DataObject, include: bool, skip: bool, chunk_size: int, vocabularies: dict[str, Vocabulary]
) -> None:
    tokenizer = vocabularies[kind].tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text = tokenizer.decode(ids, skip)
    spans = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)).map(lambda span: text[span[0] : span[0] + span[1]])
    stops = tuple(stop for stop in data.draw(st.lists(st.one_of(spans, st.just("never"), st.just("the")), max_size=3)) if stop)
    expected = first_match(text, stops)

    stream = IncrementalDetokenizer(vocabularies[kind], TextSpec(stop=stops, skip_special_tokens=skip, include_stop_str_in_output=include))
    printed, num_tokens, matched = "", 0, None
    for start in range(0, len(ids), chunk_size):
        increment = stream.feed(ids[start : start + chunk_size])
        printed, num_tokens, matched = printed + increment.text, num_tokens + increment.num_tokens, increment.matched
        if matched is not None:
            break
    else:
        increment = stream.flush()
        printed, matched = printed + increment.text, increment.matched
    if expected is None:
        assert (printed, num_tokens, matched) == (text, len(ids), None)
        return
    end, start_of_match, stop = expected
    assert (printed, matched) == (text[: end if include else start_of_match], stop)
    assert num_tokens == first_certain(vocabularies[kind], ids, skip, end)


def first_certain(vocabulary: Vocabulary, ids: list[int], skip: bool, end: int) -> int:
    """Number of tokens after which the first `end` characters of the text are certain."""
    decoder, length = vocabulary.decoder(skip), 0
    for num_tokens, token_id in enumerate(ids, start=1):
        length += len(decoder.feed(token_id))
        if length >= end:
            return num_tokens
    return len(ids)


def test_text_that_only_may_begin_a_stop_string_is_held_then_printed() -> None:
    scanner = StopStrings(["\n\nUser:"], include_in_output=False)
    assert [scanner.push(piece).text for piece in ("yes\n", "\n", "Use", "d")] == ["yes", "", "", "\n\nUsed"]


def test_the_string_that_completes_first_wins_then_the_one_that_starts_first() -> None:
    assert StopStrings(["cde", "bc"], False).push("abcde").matched == "bc"
    scan = StopStrings(["c", "abc", "bc"], False).push("xabc")
    assert (scan.matched, scan.text) == ("abc", "x")


def test_a_long_stop_string_costs_linear_time() -> None:
    scanner = StopStrings(["a" * 20_000 + "b"], False)
    assert scanner.push("a" * 200_000).text == "a" * 180_000
    assert scanner.push("b").matched is not None
