"""Of a sweep, the requests the engine would refuse, found before its first job.

A single job is refused by its own process, as early; a sweep would run its other jobs first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import InvalidRequest, ModelError
from engine.model.shape_name import is_shape
from engine.model.tokenizer import Tokenizer
from runner.errors import UserError
from runner.plan.jobs import Plan


def check_requests(plan: Plan) -> None:
    """Refuse prompts that are empty or, with their tokens, longer than ``max_context``.

    Raises
    ------
    UserError
        With the job's label, the row and the numbers.
    """
    from engine.plan import check_lengths

    for job in plan.jobs:
        for config in job.configs:
            if is_shape(config.model.path):
                continue  # no tokenizer; the engine counts, and refuses, by itself
            try:
                check_lengths(config, _lengths(config))
            except (InvalidRequest, ModelError) as error:
                raise UserError(f"{job.label}: {error}") from None


def _lengths(config: EngineConfig) -> list[int]:
    """Tokens of each prompt."""
    tokenizer = _tokenizer(config.model.path)
    chat = config.workload.template == "model"
    return [len(tokenizer.encode(tokenizer.chat(text) if chat else text)) for text in config.workload.prompts]


@cache
def _tokenizer(path: str) -> Tokenizer:
    from engine.model.gguf_file import open_gguf
    from engine.model.tokenizer import read_tokenizer

    return read_tokenizer(open_gguf(Path(path)))
