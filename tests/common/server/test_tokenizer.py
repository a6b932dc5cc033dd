"""Encoding and decoding equal transformers' fast tokenizers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from text_tokenizers import CONFIG, CORPUS, KINDS, byte_level, write_checkpoint
from transformers import PreTrainedTokenizerFast

from common.errors import RequestError, StartupError
from common.server.tokenizer import Tokenizer

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "a\n\n\tb",
    "<|im_start|>user\nhi<|im_end|>",
    "</s> inside <tool call>",
    "hello the . ! n't 's , ' the",
]


@pytest.fixture(params=sorted(KINDS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", KINDS[request.param]())


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encoding_equals_transformers(directory: Path, add_special_tokens: bool) -> None:
    ours, theirs = Tokenizer.from_dir(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("clean_up", [None, True, False])
def test_decoding_equals_transformers(directory: Path, clean_up: bool | None, skip_special_tokens: bool) -> None:
    write_config(directory, clean_up_tokenization_spaces=clean_up)
    ours, theirs = Tokenizer.from_dir(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens) == theirs.decode(ids, skip_special_tokens=skip_special_tokens)
    everything = list(range(ours.vocab_size + 3))
    assert ours.decode(everything, skip_special_tokens) == theirs.decode(everything, skip_special_tokens=skip_special_tokens)


def test_clean_up_is_on_only_where_the_config_asks_and_never_for_bpe(tmp_path: Path) -> None:
    def cleans_up(kind: str, **config: object) -> bool:
        return Tokenizer.from_dir(write_checkpoint(tmp_path / kind, KINDS[kind](), {**CONFIG, **config})).cleans_up_spaces

    assert not cleans_up("wordpiece")
    assert cleans_up("wordpiece", clean_up_tokenization_spaces=True)
    assert not cleans_up("byte_level", clean_up_tokenization_spaces=True)


def test_special_tokens_come_from_the_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_checkpoint(tmp_path, byte_level(), {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<s>", "</s>", 2)


def test_special_tokens_come_from_the_map_of_older_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level(), {})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<s>"}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == (theirs.bos_token, theirs.eos_token_id) == ("<s>", 4)


def test_a_checkpoint_may_name_no_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_checkpoint(tmp_path, byte_level(), {}))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (None, None, None)


def test_tokens_that_only_the_config_has_are_added_as_transformers_does(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(size + 1): {"content": "<second>", "special": False, **flags}, str(size): {"content": "<first>", "special": True, **flags}}
    write_checkpoint(tmp_path, byte_level(), {**CONFIG, "added_tokens_decoder": added, "pad_token": "<pad>"})
    ours, theirs = Tokenizer.from_dir(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) == size + 3
    ids = ours.encode("a<first>b<second>c<pad>")
    assert ids == theirs.encode("a<first>b<second>c<pad>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab<second>c"


def test_truncation_and_padding_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    text = "Hello, world! " * 20
    assert Tokenizer.from_dir(write_checkpoint(tmp_path, backend)).encode(text) == byte_level().encode(text).ids


def test_an_unpaired_surrogate_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_checkpoint(tmp_path, byte_level()))
    with pytest.raises(RequestError, match="surrogate") as raised:
        tokenizer.encode("a\ud800b")
    assert raised.value.failure.status == 400


def test_a_missing_tokenizer_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json; save it there"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write_checkpoint(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(StartupError, match=name.replace(".", r"\.")):
        Tokenizer.from_dir(tmp_path)


def test_text_modules_import_neither_torch_nor_transformers() -> None:
    program = """
import sys, common.server.detokenizer
print(sorted({"torch", "transformers", "numpy", "numba"} & sys.modules.keys()), open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.startswith("[] ")
    assert int(output.split()[-1]) < 150 * 1024


def write_config(directory: Path, **settings: object) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **{key: value for key, value in settings.items() if value is not None}}))
