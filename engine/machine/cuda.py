"""The CUDA machine: made-up int4 weights in pinned host memory, one NVIDIA GPU, ONNX Runtime's CUDA kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.decode.forward import AddressOf, KvView, PassShape
from engine.decode.kernels import available_threads
from engine.device.cuda import CudaDevice
from engine.device.cuda_graph import CudaRecorder
from engine.device.pinning import Pinning
from engine.errors import DeviceError, InvalidRequest
from engine.machine.cuda_forward import DeviceBuffers, DeviceForward
from engine.machine.cuda_kernels import QuantizedKernels, Target, scratch_of
from engine.machine.cuda_results import Results
from engine.machine.generated import SEED, GeneratedStore, made_up_prompt
from engine.machine.protocol import Recorder, Workspace
from engine.memory.managing import Speeds
from engine.model.shape import Shape, read_shape, shape_units
from engine.model.shape_name import is_shape

_HALF_BYTES = 2


class CudaMachine:
    """A :class:`engine.machine.protocol.Machine` on one GPU. ``config.model.path`` is ``shape:NAME``."""

    kind = "cuda"
    predicted = False
    scratch_in_process = False
    itemsize = _HALF_BYTES
    end_ids: tuple[int, ...] = ()

    def __init__(self, config: EngineConfig) -> None:
        self.shape = _checked(config)
        self.spec, self.units = self.shape.spec, shape_units(self.shape)
        self.prompts = [made_up_prompt(text, self.spec.vocab) for text in config.workload.prompts]
        self.threads = config.device.threads or available_threads()
        self._passes = PassShape(len(self.prompts), config.prefill_chunk, config.max_context)
        self.device = CudaDevice(config.device.granule_bytes)
        self.store = GeneratedStore(self.shape, self.units)
        self._pinning = Pinning(reason="nothing is loaded")
        self._recorder = CudaRecorder(self.device)

    @property
    def recorder(self) -> Recorder | None:
        return self._recorder

    def workspace(self) -> Workspace:
        scratch = scratch_of(self.shape, self._passes.rows, self._passes.chunk)
        return Workspace(DeviceBuffers.nbytes(self.shape, self._passes), scratch.total)

    def speeds(self) -> Speeds:
        raise InvalidRequest("manage=auto on device=cuda needs a probe of its bus, which does not exist yet")

    def load(self) -> None:
        """Make the weights and pin them.

        Raises
        ------
        DeviceError
            When they cannot be pinned: kernels read the embedding table where it lies.
        """
        self.store.load(self.threads)
        self._pinning = self.device.pin(self.store.base, self.store.nbytes)
        if not self._pinning.pinned:
            raise DeviceError(f"device=cuda: {self._pinning.reason}; the embedding table must be pinned")

    def compute(self, address: AddressOf, kv: KvView, buffers: int) -> CudaCompute:
        return CudaCompute(self, address, kv, buffers)

    def forward(self, address: AddressOf, kv: KvView, block: DeviceBuffers) -> DeviceForward:
        """Kernels bound to weights, KV and buffers."""
        scratch = scratch_of(self.shape, self._passes.rows, self._passes.chunk)
        widths = tuple(unit.slice("head").shape[0] for unit in self.units if unit.kind == "head")
        kernels = QuantizedKernels(self.shape, widths, scratch, Target(stream=self.device.compute_stream))
        table = (self._pinning.device_address or 0) + self.store.table_address - self.store.base
        return DeviceForward(kernels, self.shape, self.units, address, table, block, self._passes, kv, self.device)

    def buffers(self, base: int) -> DeviceBuffers:
        """The buffers of a pass in the block at ``base``."""
        return DeviceBuffers(self.shape, self._passes, base)

    def text(self, tokens: Sequence[int]) -> str:
        """A shape has no tokenizer: the ids themselves."""
        return " ".join(map(str, tokens))

    def record(self) -> dict[str, Any]:
        return {
            "digest": f"shape {self.spec.name}, seed {SEED}",
            "file_bytes": 0,
            "source": self.shape.source,
            "host_bytes": self.store.nbytes,
            "pinned": self._pinning.pinned,
        }


class CudaCompute:
    """A :class:`engine.machine.protocol.Compute`: tokens are fed back on the device and read one step later."""

    provider = "CUDAExecutionProvider"
    lag = 1
    scratch_bytes = 0

    def __init__(self, machine: CudaMachine, address: AddressOf, kv: KvView, base: int) -> None:
        block = machine.buffers(base)
        self._forward: DeviceForward | None = machine.forward(address, kv, block)
        self._results = Results(
            machine.device, len(machine.prompts), machine.spec.vocab, block.address("tokens"), block.address("logits")
        )
        self.run_prefill = self._forward.run_prefill
        self.run_decode = self._forward.run_decode
        self.begin_prefill = self._forward.begin_prefill
        self.sent = self._results.send
        self.results = self._results.take

    @property
    def rebinds(self) -> int:
        return self._forward.rebinds if self._forward is not None else 0

    def begin_decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """The tokens are on the device already: those it chose last."""
        if self._forward is not None:
            self._forward.begin_decode(lengths)

    def close(self) -> None:
        """Free the sessions: they hold the device's stream."""
        for name in ("run_prefill", "run_decode", "begin_prefill"):
            delattr(self, name)
        self._forward = None


def _checked(config: EngineConfig) -> Shape:
    if not is_shape(config.model.path):
        raise InvalidRequest("device=cuda runs on a model's shape so far, such as model=qwen14b_shape")
    if config.workload.template != "none" or not config.workload.ignore_eos:
        raise InvalidRequest("a shape has no tokenizer: use workload.template=none and ignore_eos=true")
    shape = read_shape(config.model.path)
    if shape.experts > 1:
        raise InvalidRequest(
            f"model={shape.spec.name} has experts; device=ledger counts them, device=cuda cannot run them"
        )
    if shape.bits != 4:
        raise InvalidRequest(f"model={shape.spec.name} has {shape.bits}-bit weights; device=cuda multiplies 4-bit ones")
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    return shape
