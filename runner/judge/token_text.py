"""The text of single tokens, for people who read a difference. Loaded only when there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path


def token_text(model: Path) -> Callable[[int], str | None]:
    """A function from token id to its text; None for every id when the model's tokenizer cannot be had."""

    def text(token: int) -> str | None:
        decode = _decoder(model)
        try:
            return decode([token]) if decode is not None else None
        except Exception:  # a difference must be told even when its text cannot be
            return None

    return text


@functools.cache
def _decoder(model: Path) -> Callable[[list[int]], str] | None:
    try:
        from engine.model.gguf_file import open_gguf
        from engine.model.tokenizer import read_tokenizer

        return read_tokenizer(open_gguf(model)).decode
    except Exception:  # whatever is wrong with the model, it is told elsewhere
        return None
