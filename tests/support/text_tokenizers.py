"""Small tokenizers of every published kind, built in memory, and checkpoint directories with them."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! Isn't it nice? I'm sure we've said they're here.",
    "def main():\n    return {'a': 1}\n\n\tprint(\"x\")   # 1234567890",
    "Größe, naïve café, Ελληνικά, русский язык, 日本語のテキスト, 한국어, العربية, 🙂🙃👩‍👩‍👧‍👦",
    "stop here; the end. User: hi\nAssistant: ok\n### STOP ###",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool call>", "<|ünïcode|>"]  # not special; with characters outside the byte-level alphabet
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    """As GGUF conversions of Llama 3 write it: the byte-level decoder behind others."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()])
    return tokenizer


def _spaces_as_blocks(decoder: decoders.Decoder, characters: str) -> Tokenizer:
    """BPE over U+2581 words; characters outside `characters` fall back to bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "▁the", "▁a", "in", "▁▁", "▁▁▁▁", "er", "▁stop", "日", "本", "�"]
    vocabulary = {token: token_id for token_id, token in enumerate(dict.fromkeys([*SPECIAL, *byte_tokens, *characters, *pieces]))}
    merges = [("i", "n"), ("e", "r"), ("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'"


def llama2_like() -> Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _spaces_as_blocks(decoders.Sequence(parts), LETTERS)


def gemma_like() -> Tokenizer:
    return _spaces_as_blocks(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), LETTERS)


def metaspace() -> Tokenizer:
    """Unigram with the Metaspace decoder (T5, older Llama conversions)."""
    pieces = [*SPECIAL, "▁", "▁▁", "▁the", "▁a", "▁Hello", "ing", "s", ",", ".", "!", "▁'", "'", "n", "t", "m", "x", "▁.", "日本", "é"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(rank)) for rank, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return tokenizer


def wordpiece() -> Tokenizer:
    pieces = [*SPECIAL, "the", "##ing", "##s", "a", "hello", ",", ".", "!", "?", "'", "n", "##n", "t", "s", "m", "re", "ve", "日", "##é"]
    tokenizer = Tokenizer(models.WordPiece({piece: rank for rank, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return tokenizer


def without_decoder() -> Tokenizer:
    """Tokens joined by spaces."""
    tokenizer = wordpiece()
    state = json.loads(tokenizer.to_str())
    state["decoder"] = None
    return Tokenizer.from_str(json.dumps(state))


KINDS = {
    "byte_level": byte_level, "byte_level_in_sequence": byte_level_in_sequence, "llama2_like": llama2_like, "gemma_like": gemma_like,
    "metaspace": metaspace, "wordpiece": wordpiece, "without_decoder": without_decoder,
}  # fmt: skip


def write_checkpoint(path: Path, backend: Tokenizer, config: Mapping[str, object] = CONFIG) -> Path:
    """A directory with tokenizer.json and tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), "utf-8")
    return path
