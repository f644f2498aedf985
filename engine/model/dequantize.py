"""Quantized tensors to float32, straight into the caller's array.

The plain formats are written out, since they run at memory speed without temporaries; the others go through gguf-py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError

Floats = NDArray[np.float32]
_ROWS = 8192  # blocks handled at once: small enough to stay in the cache


def dequantize_into(out: Floats, raw: bytes, type_name: str) -> None:
    """Fill ``out`` (C-contiguous, any shape) with the numbers in ``raw``, a GGUF tensor of type ``type_name``.

    Raises
    ------
    ModelError
        When the format is not known.
    """
    flat = out.reshape(-1)
    if type_name == "F32":
        flat[:] = np.frombuffer(raw, np.float32)
    elif type_name == "F16":
        flat[:] = np.frombuffer(raw, np.float16)
    elif type_name == "BF16":
        flat.view(np.uint32)[:] = np.frombuffer(raw, np.uint16)
        flat.view(np.uint32)[:] <<= 16
    elif type_name in _BLOCKS:
        width, expand = _BLOCKS[type_name]
        blocks = np.frombuffer(raw, np.uint8).reshape(-1, width)
        target = flat.reshape(-1, 32)
        for start in range(0, len(blocks), _ROWS):
            expand(blocks[start : start + _ROWS], target[start : start + _ROWS])
    else:
        _through_gguf(flat, raw, type_name)


def _half(blocks: NDArray[np.uint8], at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8], at: int, out: Floats) -> None:
    out[:, :16] = blocks[:, at:] & 15
    out[:, 16:] = blocks[:, at:] >> 4


def _q4_0(blocks: NDArray[np.uint8], out: Floats) -> None:
    _nibbles(blocks, 2, out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: NDArray[np.uint8], out: Floats) -> None:
    _nibbles(blocks, 4, out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: NDArray[np.uint8], out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


_BLOCKS: dict[str, tuple[int, Callable[[NDArray[np.uint8], Floats], None]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
}


def _through_gguf(flat: Floats, raw: bytes, type_name: str) -> None:
    from gguf import GGMLQuantizationType, dequantize

    try:
        values = dequantize(np.frombuffer(raw, np.uint8), GGMLQuantizationType[type_name])
    except (KeyError, NotImplementedError):
        raise ModelError(f"tensors of type {type_name} are not supported") from None
    flat[:] = values.reshape(-1)
