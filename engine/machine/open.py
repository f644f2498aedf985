"""Which machine a configuration asks for."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.machine.protocol import Machine
from engine.model.shape_name import is_shape


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
    if is_shape(config.model.path):
        raise InvalidRequest("a shape has no weights to run: use device=ledger, or model.path= with a GGUF file")
    from engine.machine.host import HostMachine

    return HostMachine(config)
