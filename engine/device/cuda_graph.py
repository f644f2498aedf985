"""CUDA graphs: what is enqueued on a device's two streams, recorded once and launched in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import check
from engine.device.exclusion import capturing
from engine.errors import DeviceError


class CudaRecorder:
    """A :class:`engine.machine.protocol.Recorder` on a CUDA device.

    What is recorded must begin on the compute stream, reach the copy stream through an event, and come back to the
    compute stream the same way.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._cu = device, device.driver
        self._made: list[Any] = []

    def record(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        cu, stream = self._cu, self._device.compute_stream
        with capturing():
            # Relaxed: kernels take scratch from their arena while they are recorded.
            check(cu.cuStreamBeginCapture, stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                enqueue()
            except BaseException as error:
                code, _ = cu.cuStreamEndCapture(stream)
                if isinstance(error, Exception):
                    raise DeviceError(f"recording a step failed: {error} (the driver ended it with {code})") from error
                raise
            graph = check(cu.cuStreamEndCapture, stream)
            try:
                made = check(cu.cuGraphInstantiate, graph, 0)
            finally:
                check(cu.cuGraphDestroy, graph)
        self._made.append(made)

        def replay() -> None:
            check(cu.cuGraphLaunch, made, stream)

        return replay

    def close(self) -> None:
        self._device.synchronize()
        for made in self._made:
            check(self._cu.cuGraphExecDestroy, made)
        self._made.clear()
