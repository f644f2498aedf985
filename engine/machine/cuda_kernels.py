"""ONNX Runtime's kernels for quantized decoders, on the device's own streams and memory.

Each session has an allocator arena of its own; each is capped, and together they are what the workspace is charged for
scratch. A pass of at most :data:`FUSED_ROWS` tokens multiplies packed weights as they are; a longer one unpacks a whole
matrix first, which the charge then holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from engine.decode.kernels import one_thread_pool
from engine.errors import DeviceError
from engine.model.quantized_graph import embed_graph, final_norm_graph, head_graph, layer_graph, pick_graph
from engine.model.shape import Shape

EXECUTION_PROVIDER = "CUDAExecutionProvider"
FUSED_ROWS = 8
_HALF_BYTES = 2
_SMALL = 1 << 20
_FIXED = 8 << 20
"""Scratch of the layer that does not depend on shapes: attention's partial results, rounding."""


@dataclass(frozen=True)
class Placed:
    """Memory of a kernel's input or output. ``on_host`` marks the few that kernels read from host memory."""

    address: int
    shape: tuple[int, ...]
    dtype: type[np.generic] = np.float16
    on_host: bool = False


@dataclass(frozen=True)
class Target:
    """Where kernels run: the provider, the name it has for its memory, the compute stream (None: its own)."""

    provider: str = EXECUTION_PROVIDER
    memory: str = "cuda"
    stream: int | None = None


@dataclass(frozen=True)
class Scratch:
    """Caps of the arenas, in bytes."""

    layer: int
    pick: int
    small: int = _SMALL

    @property
    def total(self) -> int:
        """All of them: the layer, the token's choice, the head's chunks, embedding and norm."""
        return self.layer + self.pick + 4 * self.small


def scratch_of(shape: Shape, rows: int, chunk: int) -> Scratch:
    """What passes of ``rows`` rows and prefill chunks of ``chunk`` tokens take at most."""
    spec = shape.spec
    tokens = max(rows, chunk)
    widths = 6 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 5 * spec.inner
    matrices = [np.prod(d) for d in spec.layer_shapes().values() if len(d) == 2]
    unpacked = int(max(matrices)) * _HALF_BYTES if tokens > FUSED_ROWS else 0
    # Allocations are rounded up and freed pieces do not always fit the next: twice the sum.
    return Scratch(2 * (tokens * widths * _HALF_BYTES + unpacked) + _FIXED, rows * spec.vocab * 32 + 4 * _SMALL)


class Bound:
    """One session with inputs and outputs bound to addresses. ``binds`` counts calls."""

    def __init__(self, session: Any, options: Any, memory: str) -> None:
        self._session, self._options, self._memory = session, options, memory
        self._binding = session.io_binding()
        self.binds = 0

    def inputs(self, tensors: Mapping[str, Placed]) -> None:
        """Bind inputs by name."""
        for name, t in tensors.items():
            self._binding.bind_input(name, "cpu" if t.on_host else self._memory, 0, t.dtype, t.shape, t.address)
        self.binds += len(tensors)

    def outputs(self, tensors: Mapping[str, Placed]) -> None:
        """Bind outputs by name."""
        for name, t in tensors.items():
            self._binding.bind_output(name, self._memory, 0, t.dtype, t.shape, t.address)
        self.binds += len(tensors)

    def run(self) -> None:
        """Enqueue once on the compute stream."""
        self._session.run_with_iobinding(self._binding, self._options)


class QuantizedKernels:
    """The sessions of one model; each method makes a binding to one. See :mod:`engine.model.quantized_graph`.

    Raises
    ------
    DeviceError
        When ONNX Runtime cannot run on the device.
    """

    def __init__(self, shape: Shape, widths: tuple[int, ...], scratch: Scratch, target: Target) -> None:
        self._target = target
        self._options = ort.RunOptions()
        # Work is enqueued, not waited for.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if target.provider == EXECUTION_PROVIDER:
            _load_libraries()
        self._layer = self._open(layer_graph(shape), scratch.layer)
        self._embed = self._open(embed_graph(shape), scratch.small)
        self._norm = self._open(final_norm_graph(shape), scratch.small)
        self._heads = {width: self._open(head_graph(shape, width), scratch.small) for width in set(widths)}
        self._pick = self._open(pick_graph(widths), scratch.pick)

    def layer(self) -> Bound:
        """A decoder layer."""
        return self._bound(self._layer)

    def embed(self) -> Bound:
        """Rows of the embedding table."""
        return self._bound(self._embed)

    def final_norm(self) -> Bound:
        """The norm before the head."""
        return self._bound(self._norm)

    def head(self, width: int) -> Bound:
        """One chunk of the head."""
        return self._bound(self._heads[width])

    def pick(self) -> Bound:
        """The choice of tokens."""
        return self._bound(self._pick)

    def _bound(self, session: Any) -> Bound:
        return Bound(session, self._options, self._target.memory)

    def _open(self, graph: bytes, cap: int) -> Any:
        one_thread_pool()
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # shapes change from pass to pass
        # A copy of the weights packed anew would be memory that nobody accounts for.
        options.add_session_config_entry("ep.cuda.fpa_intb_gemm", "0")
        target = self._target
        if target.stream is None:
            return ort.InferenceSession(graph, options, providers=[target.provider])
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {
            "device_id": "0",
            "user_compute_stream": str(target.stream),
            "arena_extend_strategy": "kSameAsRequested",
            "gpu_mem_limit": str(cap),
            "enable_cuda_graph": "0",
        }
        try:
            session = ort.InferenceSession(graph, options, providers=[(target.provider, settings)])
        except Exception as error:
            raise DeviceError(f"ONNX Runtime's {target.provider} cannot run this model: {_first_line(error)}") from None
        if target.provider not in session.get_providers():
            raise DeviceError(
                f"ONNX Runtime has no {target.provider}; install onnxruntime-gpu and the CUDA libraries it names"
            )
        return session


def _load_libraries() -> None:
    """Bring in CUDA's libraries from their Python packages, where they are not on the loader's path."""
    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with contextlib.suppress(Exception):  # a session says what is missing
            preload()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
