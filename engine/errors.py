"""What can go wrong in the engine, as a caller can catch it.

EbbError
 ├── InvalidRequest       the caller asked for something that cannot be: bad size, context too long
 ├── ModelError           the model file is missing, damaged or of a kind that is not supported
 ├── CapacityUnavailable  the memory asked for cannot be had under the managed limit
 ├── DeviceError          a device call failed (map, create, copy)
 └── InvalidLogits        a forward pass produced NaN or infinity

Every message is one line that a person can act on: what is wrong, where, what was expected.
"""

from __future__ import annotations

_LONGEST_LINE = 600


class EbbError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is the line a user sees."""


class InvalidRequest(EbbError, ValueError):
    """The request itself is wrong; nothing was allocated."""


class ModelError(EbbError):
    """The model cannot be used: missing, damaged, or not supported.

    Names out of a damaged file may hold anything, so the message is kept to one printable line.
    """

    def __init__(self, message: str) -> None:
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]} ...")


class CapacityUnavailable(EbbError):
    """The bytes asked for cannot be granted; every ledger figure is as it was before."""


class DeviceError(EbbError):
    """A device call failed."""


class InvalidLogits(EbbError):
    """Logits of one row at one step were not finite."""

    def __init__(self, row: int, step: int, generation: int) -> None:
        super().__init__(
            f"logits are not finite: generation {generation}, row {row}, step {step}; no token was taken from them"
        )
        self.row = row
        self.step = step
        self.generation = generation
