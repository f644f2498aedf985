"""Planted faults: how tests show that the gates can fail.

A run with a fault says so and is never offered as a result. Kinds:

``poison_ring``   fill every ring slot with NaN once its unit has run; a correct engine gives the same tokens.
``skip_copy``     leave out every copy into the ring; the token gate must fail.
``overwrite``     replace one granule of a unit, or of a layer's keys or values, by other numbers before a step.
``nan``           replace one granule of a unit by NaN before a step; the logits gate must fail.
``exit``          end the process without a word before a step, with an exit code or a signal number (negative).
``hang``          sleep for ever before a step.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engine.device.protocol import Device
from engine.errors import InvalidRequest
from engine.weights.residency import Fill

_LOUD = np.float32(32)
"""Planted numbers are well above any weight, as bytes of another tensor or another type would be."""

KINDS = ("poison_ring", "skip_copy", "overwrite", "nan", "exit", "hang")


@dataclass(frozen=True)
class Faults:
    """One planted fault, or none. ``generation`` counts warm-up from 0; ``step`` is the token about to be made."""

    kind: Literal["none", "poison_ring", "skip_copy", "overwrite", "nan", "exit", "hang"] = "none"
    generation: int = 0
    step: int = 1
    unit: int | None = None
    kv_range: int | None = None
    granule: int = 0
    seed: int = 0
    code: int = 0

    @staticmethod
    def from_dict(data: dict[str, Any] | None) -> Faults:
        """Read a fault description.

        Raises
        ------
        InvalidRequest
            When the kind or a field is not known.
        """
        if not data:
            return Faults()
        try:
            faults = Faults(**data)
        except TypeError as error:
            raise InvalidRequest(f"fault: {error}") from None
        if faults.kind not in KINDS:
            raise InvalidRequest(f"fault: no such kind {faults.kind!r}; kinds: {', '.join(KINDS)}")
        return faults

    @property
    def skip_copy(self) -> bool:
        """Whether copies into the ring are left out."""
        return self.kind == "skip_copy"

    @property
    def poison_ring(self) -> bool:
        """Whether ring slots are poisoned after use."""
        return self.kind == "poison_ring"

    def poison(self, device: Device, fills: tuple[Fill, ...]) -> None:
        """Fill what was just used with NaN."""
        for fill in fills:
            device.fill(fill.address, fill.nbytes, 0xFF)

    def due(self, generation: int, step: int) -> bool:
        """Whether this step is the one the fault is planted before."""
        return self.kind in ("overwrite", "nan", "exit", "hang") and (
            generation,
            step,
        ) == (self.generation, self.step)

    def strike(self, device: Device, address: int) -> None:
        """Do what is due; ``address`` is that of the granule it is about."""
        if self.kind == "exit":
            if self.code < 0:
                os.kill(os.getpid(), -self.code)
            os._exit(self.code)
        if self.kind == "hang":
            time.sleep(86400)
        numbers = device.granularity // 4
        values = _LOUD * np.random.default_rng(self.seed).standard_normal(numbers).astype(np.float32)
        if self.kind == "nan":
            values[:] = np.nan
        device.write(address, values.tobytes())
