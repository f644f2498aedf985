"""The CUDA driver API: loaded when first asked for, every call checked, one line when there is no GPU to use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from engine.errors import DeviceError, EbbError, InvalidRequest

_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


def check(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function; its one result, a tuple of several, or None where it has none.

    Raises
    ------
    DeviceError
        Naming the call and the driver's own word for what went wrong.
    """
    return _result(function.__name__, *function(*arguments))


def load_driver() -> Any:
    """The module ``cuda.bindings.driver``. Importing it needs no driver; its first call does."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise InvalidRequest("device=cuda: the package cuda-python is not installed on this machine") from error
    return driver


def open_gpu(driver: Any, ordinal: int) -> Any:
    """Start the driver and return its handle of GPU ``ordinal``.

    Raises
    ------
    InvalidRequest
        When there is no driver, no such GPU, or the GPU cannot map memory at addresses of our choice.
    DeviceError
        When the driver is there and does not start.
    """
    try:
        outcome = driver.cuInit(0)
    except (RuntimeError, OSError) as error:
        raise InvalidRequest(
            "device=cuda: no NVIDIA driver on this machine (libcuda could not be loaded); device=host needs none"
        ) from error
    count = 0
    if getattr(outcome[0], "name", "") != _NO_DEVICE:
        _result("cuInit", *outcome)
        count = check(driver.cuDeviceGetCount)
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise InvalidRequest(f"device=cuda: no GPU on this machine that the NVIDIA driver shows{hidden}")
    if not 0 <= ordinal < count:
        raise InvalidRequest(f"device=cuda: there is no GPU {ordinal}; the driver shows {count}, counted from 0")
    gpu = check(driver.cuDeviceGet, ordinal)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not check(driver.cuDeviceGetAttribute, attribute, gpu):
        raise InvalidRequest(f"device=cuda: GPU {ordinal} does not support virtual memory management (cuMemCreate)")
    return gpu


def unavailable(ordinal: int = 0) -> str | None:
    """Why ``device=cuda`` cannot be used here, or None when it can."""
    try:
        open_gpu(load_driver(), ordinal)
    except EbbError as error:
        return str(error)
    return None


def _result(call: str, code: Any, *results: Any) -> Any:
    if int(code):
        raise DeviceError(f"{call} failed: {getattr(code, 'name', code)}")
    if len(results) > 1:
        return results
    return results[0] if results else None
