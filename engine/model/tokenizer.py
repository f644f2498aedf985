"""Text to token ids and back, with the vocabulary and the chat template that ship inside the GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest, ModelError
from engine.model.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

# What splits text before the merges, by the name the file gives it.
_DIGITS_APART = ("smollm",)
_PLAIN = ("gpt-2", "default")
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE tokenizer. ``eos_ids`` are all ids that end a text."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    chat_template: str | None
    vocab: int
    _inner: HfTokenizer
    _specials: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the begin token only where the model asks for one."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``, special tokens included."""
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def chat(self, prompt: str) -> str:
        """``prompt`` as one user turn of the model's chat template.

        Raises
        ------
        InvalidRequest
            When the file has no chat template.
        """
        if self.chat_template is None:
            raise InvalidRequest("this model file has no chat template; use template=none")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self.chat_template)
        messages = [{"role": "user", "content": prompt}]
        return template.render(messages=messages, add_generation_prompt=True, **self._specials)


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises
    ------
    ModelError
        When it is missing or of a kind that is not supported, by name.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HfTokenizer

    meta = file.metadata
    kind, splitter = (
        meta.get("tokenizer.ggml.model"),
        meta.get("tokenizer.ggml.pre", "default"),
    )
    if kind != "gpt2" or splitter not in _DIGITS_APART + _PLAIN:
        raise ModelError(f"{file.path}: tokenizer {kind!r} with splitter {splitter!r} is not supported")
    tokens, merges = (
        _strings(file, "tokenizer.ggml.tokens"),
        _strings(file, "tokenizer.ggml.merges"),
    )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        inner = HfTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{file.path}: the tokenizer's merges do not fit its vocabulary: {error}") from None
    bytes_apart = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits_apart = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = (
        pre_tokenizers.Sequence([digits_apart, bytes_apart]) if splitter in _DIGITS_APART else bytes_apart
    )
    inner.decoder = decoders.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", [])
    special = [t for t, number in zip(tokens, types, strict=False) if number in (_CONTROL, _USER_DEFINED)]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ids = {key: _token_id(meta, f"tokenizer.ggml.{key}_token_id", len(tokens)) for key in ("bos", "eos", "eot")}
    eos_ids = tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"]) if i is not None))
    return Tokenizer(
        eos_ids=eos_ids,
        bos_id=ids["bos"] if meta.get("tokenizer.ggml.add_bos_token", False) else None,
        chat_template=meta.get("tokenizer.chat_template"),
        vocab=len(tokens),
        _inner=inner,
        _specials={f"{key}_token": tokens[i] for key, i in ids.items() if i is not None},
    )


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelError(f"{file.path}: {key} is missing; the file brings no tokenizer")
    return value


def _token_id(meta: dict[str, Any], key: str, vocab: int) -> int | None:
    value = meta.get(key)
    return value if isinstance(value, int) and 0 <= value < vocab else None
