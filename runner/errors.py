"""What can end a command, one class per exit code.

RunnerError
 ├── UserError     2    the command, the configuration or the model cannot be used; nothing was run
 ├── Contended     3    another process holds the device, or whether one does cannot be seen
 ├── ArmCrashed    4    an arm's process died, hung past its time limit, or the device failed
 ├── GateFailed    1    an arm ran and its result is not valid
 └── Interrupted   130  Ctrl-C

``line`` is what the user sees after ``error: ``; ``hint``, when there is one, is the line after it. Neither holds a
newline.
"""

from __future__ import annotations

from typing import ClassVar


class RunnerError(Exception):
    """Base of the errors that end a command. ``exit_code`` is the status the process ends with."""

    exit_code: ClassVar[int] = 1

    def __init__(self, line: str, hint: str | None = None) -> None:
        super().__init__(line)
        self.line = _one_line(line)
        self.hint = None if hint is None else _one_line(hint)

    def shown(self) -> str:
        """The one or two lines for stderr, without a final newline."""
        return f"error: {self.line}" if self.hint is None else f"error: {self.line}\nhint: {self.hint}"


class UserError(RunnerError):
    """Bad input: nothing was run."""

    exit_code = 2


class Contended(RunnerError):
    """The device is in use by others, or it cannot be seen whether it is."""

    exit_code = 3


class ArmCrashed(RunnerError):
    """The process of an arm ended without a result."""

    exit_code = 4


class GateFailed(RunnerError):
    """A gate failed: the run's figures are not a result."""

    exit_code = 1


class Interrupted(RunnerError):
    """The user stopped the command."""

    exit_code = 130

    def __init__(self, line: str = "interrupted", hint: str | None = None) -> None:
        super().__init__(line, hint)


def _one_line(text: str) -> str:
    return " ".join(text.split())
