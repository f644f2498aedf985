"""Which machine a configuration asks for, and which plain loop its tokens are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.machine.protocol import Machine
from engine.model.shape_name import is_shape

if TYPE_CHECKING:
    from engine.machine.cuda_reference import CudaPlainLoop
    from engine.reference import PlainLoop


def open_machine(config: EngineConfig) -> Machine:
    """Open the machine of ``config.device.kind`` with the model of ``config.model``.

    Only the modules of that kind are imported.

    Raises
    ------
    EbbError
        The model cannot be used or the device cannot be opened.
    """
    if config.device.kind == "ledger":
        from engine.machine.ledger import LedgerMachine

        return LedgerMachine(config)
    if config.device.kind == "cuda":
        from engine.machine.cuda import CudaMachine

        return CudaMachine(config)
    if is_shape(config.model.path):
        raise InvalidRequest("a shape's weights are made up on device=cuda only; device=ledger counts without any")
    from engine.machine.host import HostMachine

    return HostMachine(config)


def open_reference(config: EngineConfig) -> PlainLoop | CudaPlainLoop:
    """The plain loop on the device of ``config``, loaded. Errors as :func:`open_machine`."""
    if config.device.kind == "cuda":
        from engine.machine.cuda_reference import CudaPlainLoop

        return CudaPlainLoop(config)
    from engine.reference import PlainLoop

    return PlainLoop(config)
