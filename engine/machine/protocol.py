"""A machine: everything about a device kind that the engine above it must not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.decode.forward import KvView
from engine.device.protocol import Device
from engine.memory.managing import Speeds
from engine.model.spec import ModelSpec
from engine.weights.layout import Unit

AddressOf = Callable[[Unit, str], int]
"""Where a unit's tensor with this role lies on the device."""


class WeightSource(Protocol):
    """Host memory that holds every weight once, unit by unit."""

    units: tuple[Unit, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes every decode step reads: W."""

    def address(self, unit: Unit) -> int:
        """Host address of a unit's first byte."""


class Recorder(Protocol):
    """Records what is enqueued on the device's streams, so that it can be enqueued again in one call."""

    def record(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Record what ``enqueue`` puts on the streams, running none of it; the result replays it.

        Raises
        ------
        DeviceError
            When it cannot be recorded; the streams are as before.
        """

    def close(self) -> None:
        """Free every recording."""


class Compute(Protocol):
    """Kernels bound to one engine's memory.

    ``lag`` is how many passes with head may be under way before the results of one are asked for. Where it is not 0,
    tokens and lengths are fed back on the device, and what :meth:`begin_decode` is told of them may be older.
    """

    provider: str
    lag: int
    scratch_bytes: int
    """Growth of the process's own memory while kernels ran; 0 where scratch does not lie there."""

    @property
    def rebinds(self) -> int:
        """Bindings made since load."""

    def begin_prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """Set the inputs of a prefill pass: a chunk of one row's tokens after ``past`` tokens."""

    def begin_decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the inputs of a decode pass: each row's last token, and the tokens it already holds."""

    def run_prefill(self, unit: Unit, row: int, count: int, *, last_row: bool) -> None:
        """Run one unit of a prefill pass over ``count`` tokens of ``row``."""

    def run_decode(self, unit: Unit) -> None:
        """Run one unit of a decode pass."""

    def sent(self) -> None:
        """A pass with head has been enqueued: its results may come back."""

    def results(self, generation: int, step: int) -> tuple[list[int], list[str]]:
        """Token and logits digest of each row of the oldest pass with head not yet asked about. Raises InvalidLogits.

        ``generation`` and ``step`` only name the pass in an error.
        """

    def close(self) -> None:
        """Let go of kernels and bindings, before the device closes."""


@dataclass(frozen=True)
class Workspace:
    """What a pass needs beside weights and KV, in bytes: ``buffers`` are mapped, ``scratch`` is the kernels' own."""

    buffers: int
    scratch: int


class Machine(Protocol):
    """One device kind with one model on it, before anything is placed. Opening one may raise an EbbError.

    ``scratch_in_process`` says whether kernel scratch lies in the process's own memory, where it can be measured;
    elsewhere the kernels are held to their charge. ``recorder`` is None where a step cannot be recorded.
    """

    kind: str
    predicted: bool
    spec: ModelSpec
    units: tuple[Unit, ...]
    prompts: list[list[int]]
    end_ids: tuple[int, ...]
    itemsize: int
    threads: int
    scratch_in_process: bool

    @property
    def recorder(self) -> Recorder | None:
        """What records steps."""

    @property
    def device(self) -> Device:
        """The device, open."""

    @property
    def store(self) -> WeightSource:
        """The host weight store, empty until :meth:`load`."""

    def workspace(self) -> Workspace:
        """The workspace of a pass."""

    def speeds(self) -> Speeds:
        """How fast the device reads and copies, measured now.

        Raises
        ------
        InvalidRequest
            When this kind of device has nothing to measure.
        """

    def load(self) -> None:
        """Bring the weights into the store."""

    def compute(self, address: AddressOf, kv: KvView, buffers: int) -> Compute:
        """Kernels bound to weights, KV and the workspace block at ``buffers``."""

    def text(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""

    def record(self) -> dict[str, Any]:
        """What the model is, as JSON types."""
