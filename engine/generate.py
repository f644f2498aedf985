"""Text from the engine alone: ``python -m engine.generate --limit 1GiB --headroom 512MiB "prompt"``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.config import (
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    PolicyConfig,
    WorkloadConfig,
)
from engine.errors import EbbError
from engine.sizes import format_bytes, human_bytes, parse_size


def main(arguments: list[str] | None = None) -> int:
    """Stream the continuation of one prompt; 0, or 2 with one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        config = _config(options)
        _stream(config, quiet=options.quiet)
    except EbbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.generate", description=__doc__)
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--model", metavar="GGUF", help="model file; default: the one Ebb fetches once")
    parser.add_argument(
        "--limit",
        default="1GiB",
        metavar="SIZE",
        help="managed device memory (default 1GiB)",
    )
    parser.add_argument(
        "--headroom",
        default="0",
        metavar="SIZE",
        help="bytes never lent to weights (default 0)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens to generate at most (default 64)",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        default=2048,
        metavar="N",
        help="declared context (default 2048)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt through the model's chat template",
    )
    parser.add_argument("--quiet", action="store_true", help="print the text only")
    return parser


def _config(options: argparse.Namespace) -> EngineConfig:
    from engine.model.fetch import default_model

    limit, headroom = (
        _size("--limit", options.limit),
        _size("--headroom", options.headroom),
    )
    path = Path(options.model) if options.model else default_model(cache_dir=None, progress=sys.stderr.isatty())
    return EngineConfig(
        model=ModelConfig(str(path)),
        workload=WorkloadConfig(
            prompts=(options.prompt,),
            tokens=max(1, options.tokens),
            template="model" if options.chat else "none",
            ignore_eos=False,
        ),
        device=DeviceConfig(limit_bytes=limit),
        policy=PolicyConfig(lending=True, headroom_bytes=headroom),
        max_context=options.max_context,
        warmup=0,
        measured=1,
    )


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except EbbError as error:
        raise type(error)(f"{flag}={text}: {error}") from None


def _stream(config: EngineConfig, quiet: bool) -> None:
    from engine.engine import Engine

    with Engine(config) as engine:
        if not quiet:
            budget = engine.plan.budget
            print(
                f"{engine.spec.name}: {human_bytes(engine.weight_bytes)} of weights, "
                f"budget {format_bytes(budget.bytes)} ({budget.bound_by})",
                file=sys.stderr,
            )
        for piece in engine.stream():
            print(piece, end="", flush=True)
        print()
        if not quiet:
            window = engine.loop.window
            per_step = window.decode.htod_bytes / window.decode_steps if window.decode_steps else 0
            print(f"{human_bytes(per_step)} streamed a step", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
