"""The command line: compose, plan, execute. A bad command is told in one line before anything heavy is imported."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from runner.errors import Interrupted, RunnerError


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0, or the code of the error class that ended it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a narrow encoding costs a mark, never the run
    try:
        return _main(list(arguments))
    except KeyboardInterrupt:
        return _tell(Interrupted())
    except RunnerError as error:
        return _tell(error)


def _main(arguments: list[str]) -> int:
    if any(argument in ("--help", "-h") for argument in arguments):
        from runner.cli.help import help_text

        print(help_text())
        return 0

    from runner.cli.compose import compose

    composed = compose(arguments)
    if composed is None:  # Hydra answered itself: --cfg, --info, --version, --shell-completion
        return 0

    from runner.plan.jobs import make_plan

    plan = make_plan(composed.jobs, composed.sweep)
    if plan.sweep:
        from runner.plan.requests import check_requests

        check_requests(plan)

    from runner.execution.execute import execute

    return execute(plan)


def _tell(error: RunnerError) -> int:
    print(error.shown(), file=sys.stderr)
    return error.exit_code
