"""Text to token ids and back, from a checkpoint's own files, without transformers (which pulls in torch: 360 MB a process).

tokenizer.json is used exactly as it is (normaliser, pre-tokeniser, post-processor with its BOS, decoder). tokenizer_config.json,
and special_tokens_map.json where the former has no `added_tokens_decoder`, name the special tokens and may add tokens. The chat
template is chat_template.jinja, else `chat_template` in the config: a string, or a list of named ones, of which `tool_use` is taken
for requests with tools and `default` otherwise. So do transformers' fast tokenizers; the tests hold this one against them.

Clean-up of spaces before punctuation happens after decoding where the config asks for it, but never for BPE vocabularies: it was made
for WordPiece and destroys text of others (transformers 5 decides the same).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from common.config import JsonObject
from common.errors import StartupError, invalid
from common.server.chat_template import ChatTemplate

CLEAN_UP_REPLACEMENTS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip  # order matters: each sees the result of those before it


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after loading."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], templates: Mapping[str, ChatTemplate], clean_up: bool
    ) -> None:
        """special_tokens: name ("bos_token", ...) -> text. templates: by name; empty when the model has none."""
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = dict(templates)
        self.cleans_up_spaces = clean_up
        self.special_ids = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.decoder_spec: JsonObject = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}

    @classmethod
    def from_dir(cls, path: Path) -> "Tokenizer":
        """Raises StartupError when the files are missing or unreadable."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise StartupError(f"{path} has no tokenizer.json; save it there with AutoTokenizer.from_pretrained(...).save_pretrained({str(path)!r})")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise StartupError(f"{file} is not a readable tokenizer: {error}; fetch it again") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(path / "tokenizer_config.json")
        special_tokens = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
        _add_missing_tokens(backend, config, special_tokens)
        forced = bool(config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"))
        clean_up = bool(config.get("clean_up_tokenization_spaces")) and (forced or type(backend.model).__name__ != "BPE")
        templates = {name: ChatTemplate(source) for name, source in _template_sources(path, config).items()}
        return cls(backend, special_tokens, templates, clean_up)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included. The model's logits may be wider (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id it does not have."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Text made by apply_chat_template holds its special tokens already: encode it without adding any."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # how tokenizers says that the string has no UTF-8 form
            raise invalid("the text holds an unpaired surrogate and is not valid Unicode; send valid UTF-8", param="prompt") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, in one go; ids that the vocabulary does not have are nothing."""
        text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self.cleans_up_spaces else text

    def decode_raw(self, ids: Sequence[int]) -> str:
        """As decode(), without skipping tokens or cleaning up: what incremental decoding builds on."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[JsonObject], add_generation_prompt: bool = True, tools: Sequence[JsonObject] | None = None, **variables: object
    ) -> str:
        """The prompt text of a conversation. `variables` reach the template and win over the special tokens of the same name.

        Raises RequestError (400) when the model has no template or its template refuses the messages.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            ways = "use /v1/completions, or put a chat_template.jinja into the model's directory"
            raise invalid(f"this model has no default chat template; {ways}", code="no_chat_template")
        named = {**self._special_tokens, **variables}
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=named)


def clean_up_spaces(text: str) -> str:
    """Without the spaces that word-wise decoding leaves before punctuation and English contractions."""
    for spaced, joined in CLEAN_UP_REPLACEMENTS:
        text = text.replace(spaced, joined)
    return text


def _read_json(file: Path) -> JsonObject:
    """The object in `file`, {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise StartupError(f"{file} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise StartupError(f"{file} holds no JSON object; fetch it again")
    return content


def _special_tokens(config: JsonObject, special_tokens_map: JsonObject) -> dict[str, str]:
    """Name -> text of every special token that the files name (also model-specific ones, such as image_token)."""
    entries = config if "added_tokens_decoder" in config else {**config, **special_tokens_map}
    extra = entries.get("extra_special_tokens")
    named = {**entries, **(extra if isinstance(extra, dict) else {})}
    texts = {key: value["content"] if isinstance(value, dict) and "content" in value else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: JsonObject, special_tokens: Mapping[str, str]) -> None:
    """Make the vocabulary hold what the config adds, with the config's flags, in the order of ids."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    described = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda entry: int(entry[0]))
    missing = [token for _, fields in described if repr(token := tokenizers.AddedToken(**fields)) not in known]
    named = {token.content for token in missing} | {token.content for token in backend.get_added_tokens_decoder().values()}
    missing += [tokenizers.AddedToken(text, special=True) for text in dict.fromkeys(special_tokens.values()) if text not in named]
    if missing:
        backend.add_tokens(missing)


def _template_sources(path: Path, config: JsonObject) -> dict[str, str]:
    """Templates by name. Files win over the config."""
    sources = {file.stem: file.read_text("utf-8") for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (file := path / "chat_template.jinja").is_file():
        sources["default"] = file.read_text("utf-8")
    if sources:
        return sources
    match config.get("chat_template"):
        case str(source):
            return {"default": source}
        case list(entries):
            return {entry["name"]: entry["template"] for entry in entries}
    return {}
