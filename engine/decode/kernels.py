"""ONNX Runtime as the kernel library: three sessions that serve every layer, and bindings to memory that never moves.

All sessions share one thread pool and one allocator arena. A pool per session would leave each pool's
threads spinning against the others' (28 instead of 14 ms a token on two cores).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from engine.errors import InvalidRequest
from engine.model.graph import final_norm_graph, head_graph, layer_graph
from engine.model.spec import ModelSpec

EXECUTION_PROVIDER = "CPUExecutionProvider"
_FLOAT, _INT32 = np.float32, np.int32

_pool_threads: int | None = None


@dataclass(frozen=True)
class Tensor:
    """Memory of a kernel's input or output: address, shape and element type."""

    address: int
    shape: tuple[int, ...]
    dtype: type[np.generic] = _FLOAT


class Binding:
    """One session with inputs and outputs bound to addresses; rebinding a name replaces it. ``binds`` counts calls."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self.binds = 0

    def inputs(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind inputs by name."""
        for name, tensor in tensors.items():
            self._binding.bind_input(name, "cpu", 0, tensor.dtype, tensor.shape, tensor.address)
        self.binds += len(tensors)

    def outputs(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind outputs by name."""
        for name, tensor in tensors.items():
            self._binding.bind_output(name, "cpu", 0, tensor.dtype, tensor.shape, tensor.address)
        self.binds += len(tensors)

    def run(self) -> None:
        """Run once; returns when the outputs are written."""
        self._session.run_with_iobinding(self._binding)


class Kernels:
    """The sessions of one model: ``layer``, ``final_norm`` and ``head`` make bindings to them."""

    provider = EXECUTION_PROVIDER

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        one_thread_pool(threads)
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.enable_mem_pattern = False  # shapes change from pass to pass
        options.log_severity_level = 3
        options.add_session_config_entry("session.use_env_allocators", "1")
        self._layer, self._final_norm, self._head = (
            ort.InferenceSession(graph, options, providers=[EXECUTION_PROVIDER])
            for graph in (layer_graph(spec), final_norm_graph(spec), head_graph(spec))
        )

    def layer(self) -> Binding:
        """A binding to the decoder layer (:func:`engine.model.graph.layer_graph`)."""
        return Binding(self._layer)

    def final_norm(self) -> Binding:
        """A binding to the final norm (:func:`engine.model.graph.final_norm_graph`)."""
        return Binding(self._final_norm)

    def head(self) -> Binding:
        """A binding to one vocabulary chunk of the head (:func:`engine.model.graph.head_graph`)."""
        return Binding(self._head)


def available_threads() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def one_thread_pool(threads: int | None = None) -> None:
    """Make the process-wide pool and arena, once; every session must use it. None takes the pool there is.

    Raises
    ------
    InvalidRequest
        When the process already has a pool of another size; ONNX Runtime cannot change it.
    """
    global _pool_threads
    if _pool_threads is None:
        threads = threads or available_threads()
        ort.set_global_thread_pool_sizes(threads, 1)
        # Grow by what is asked for, so that scratch memory can be held to its charge.
        arena = ort.OrtArenaCfg(0, 1, -1, -1)
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, arena)
        _pool_threads = threads
    elif threads not in (None, _pool_threads):
        raise InvalidRequest(
            f"this process already runs ONNX Runtime with {_pool_threads} threads; {threads} need a new process"
        )
