"""The ledger machine: a model's tensor table and a device that only counts. Its figures are predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.decode.forward import AddressOf, KvView
from engine.device.ledger import LedgerDevice
from engine.errors import InvalidRequest
from engine.machine.protocol import Workspace
from engine.memory.managing import Speeds
from engine.model.shape import read_shape, shape_units, tensor_table
from engine.model.shape_name import is_shape
from engine.weights.layout import Unit

_FP16 = 2
SCRATCH_FIXED = 2 << 20
BYTES_PER_TOKEN = 4
"""A shape has no tokenizer: a prompt counts as one token for every so many bytes of text, at least one."""


class TableStore:
    """Where each unit would lie in host memory."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self.units = units
        self._address: list[int] = []
        at = 1 << 40
        for unit in units:
            self._address.append(at)
            at += unit.nbytes

    @property
    def weight_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)

    def address(self, unit: Unit) -> int:
        return self._address[unit.index]


class NoCompute:
    """Kernels that do nothing; every token is 0 and has no digest."""

    provider = "none (counted only)"
    rebinds = 0
    lag = 0
    scratch_bytes = 0

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def begin_prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """Nothing to set."""

    def begin_decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing to set."""

    def run_prefill(self, unit: Unit, row: int, count: int, *, last_row: bool) -> None:
        """Nothing to run."""

    def run_decode(self, unit: Unit) -> None:
        """Nothing to run."""

    def sent(self) -> None:
        """Nothing comes back."""

    def close(self) -> None:
        """Nothing to let go of."""

    def results(self, generation: int, step: int) -> tuple[list[int], list[str]]:
        return [0] * self._rows, [""] * self._rows


class LedgerMachine:
    """A :class:`engine.machine.protocol.Machine` on paper. ``config.model.path`` is ``shape:NAME``."""

    kind = "ledger"
    predicted = True
    scratch_in_process = True
    recorder = None
    itemsize = _FP16
    threads = 0
    end_ids: tuple[int, ...] = ()

    def __init__(self, config: EngineConfig) -> None:
        if not is_shape(config.model.path):
            raise InvalidRequest("device=ledger runs on a model's shape, such as model=qwen14b_shape")
        if config.workload.template != "none" or not config.workload.ignore_eos:
            raise InvalidRequest("device=ledger makes no tokens: use workload.template=none and ignore_eos=true")
        self._config, self._shape = config, read_shape(config.model.path)
        self.spec, self.units = self._shape.spec, shape_units(self._shape)
        self.prompts = [[0] * max(1, len(text.encode()) // BYTES_PER_TOKEN) for text in config.workload.prompts]
        self.store = TableStore(self.units)
        kv = self.spec.kv_bytes_per_token(_FP16) * len(self.prompts) * config.max_context
        most = self.store.weight_bytes + kv + (1 << 40)
        self.device = LedgerDevice(config.device.granule_bytes, config.device.limit_bytes or most)

    def workspace(self) -> Workspace:
        spec, config = self.spec, self._config
        rows = len(self.prompts)
        tokens = max(rows, config.prefill_chunk)
        buffers = _FP16 * (2 * tokens * spec.hidden + rows * (2 * spec.hidden + spec.vocab))
        buffers += _FP16 * config.max_context * spec.head_dim  # rope tables
        widths = 6 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 5 * spec.inner
        return Workspace(buffers, tokens * widths * _FP16 + SCRATCH_FIXED)

    def speeds(self) -> Speeds:
        raise InvalidRequest("manage=auto compares measured speeds, and device=ledger moves nothing; use manage=always")

    def load(self) -> None:
        """There is nothing to read."""

    def compute(self, address: AddressOf, kv: KvView, buffers: int) -> NoCompute:
        return NoCompute(len(self.prompts))

    def text(self, tokens: Sequence[int]) -> str:
        return ""

    def record(self) -> dict[str, Any]:
        return {
            "digest": f"shape {self.spec.name}",
            "file_bytes": 0,
            "source": self._shape.source,
            "keys": len(tensor_table(self._shape)),
        }
