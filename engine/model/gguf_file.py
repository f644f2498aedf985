"""Reading a GGUF file's header: key-values and the tensor table, every extent checked before anything is allocated.

The header of a small model holds 100,000 strings; gguf-py turns each into several arrays, which takes seconds. This
reader takes them straight from the bytes. Format: the GGUF specification of the ggml project, versions 2 and 3, little
endian. Block sizes come from gguf-py.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.errors import ModelError

_MAGIC = b"GGUF"
_HEADER_LIMIT = 512 << 20
_FIRST_READ = 8 << 20
_COUNT_LIMIT = 1 << 24
_SCALARS = {
    0: ("<B", 1), 1: ("<b", 1), 2: ("<H", 2), 3: ("<h", 2), 4: ("<I", 4), 5: ("<i", 4),
    6: ("<f", 4), 7: ("<?", 1), 10: ("<Q", 8), 11: ("<q", 8), 12: ("<d", 8),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file: ``shape`` is row-major (outermost first), ``offset`` and ``nbytes`` are its extent."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        count = 1
        for dimension in self.shape:
            count *= dimension
        return count


@dataclass(frozen=True)
class GgufFile:
    """The header of one file. ``read`` brings a tensor's raw bytes; a file that shrank meanwhile is a ModelError."""

    path: Path
    file_bytes: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    header_digest: str

    def read(self, tensor: TensorInfo) -> bytes:
        """Raw bytes of a tensor.

        Raises
        ------
        ModelError
            When the file no longer holds them.
        """
        with self.path.open("rb", buffering=0) as file:
            parts: list[bytes] = []
            at, missing = tensor.offset, tensor.nbytes
            while missing:
                part = os.pread(file.fileno(), missing, at)
                if not part:
                    raise ModelError(
                        f"{self.path}: tensor {tensor.name} ends at byte {tensor.offset + tensor.nbytes:,}, "
                        f"but the file has shrunk to {os.fstat(file.fileno()).st_size:,} B since it was opened"
                    )
                parts.append(part)
                at, missing = at + len(part), missing - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def open_gguf(path: Path) -> GgufFile:
    """Read and check the header of ``path``.

    Raises
    ------
    ModelError
        One line: the file is missing, not GGUF, damaged or shorter than its tensors.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            _check_magic(path, file.read(64), file_bytes)
        header = _read_header(path, file_bytes)
    except OSError as error:
        raise ModelError(f"{path}: cannot read the model file: {error.strerror}") from None
    metadata, rows = header.metadata, header.rows
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, expected a positive multiple of 8")
    start = -(-header.nbytes // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_number, relative in rows:
        tensor = _extent(path, name, shape, type_number, start + relative)
        end = tensor.offset + tensor.nbytes
        if end > file_bytes:
            raise ModelError(
                f"{path}: the file is truncated: tensor {name} ends at byte {end:,}, the file has {file_bytes:,} B. "
                "Copy or download it again."
            )
        if name in tensors:
            raise ModelError(f"{path}: tensor {name} is listed twice")
        tensors[name] = tensor
    return GgufFile(path, file_bytes, metadata, tensors, header.digest)


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Any]
    rows: list[tuple[str, tuple[int, ...], int, int]]
    nbytes: int
    digest: str


class _CutShort(Exception):
    """The bytes at hand end before the header does."""


def _read_header(path: Path, file_bytes: int) -> _Header:
    """Parse the header from as little of the file as holds it."""
    size = _FIRST_READ
    while True:
        with path.open("rb") as file:
            data = file.read(size)
        try:
            return _parse_header(_Cursor(path, data))
        except _CutShort:
            if size >= min(file_bytes, _HEADER_LIMIT):
                raise ModelError(
                    f"{path}: the file is truncated: its header runs past byte {len(data):,} of {file_bytes:,}. "
                    "Copy or download it again."
                ) from None
            size *= 4


def _parse_header(cursor: _Cursor) -> _Header:
    cursor.skip(8)
    tensor_count, pair_count = cursor.count("tensors"), cursor.count("key-values")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I", 4), key)
    rows = [_tensor_row(cursor) for _ in range(tensor_count)]
    return _Header(metadata, rows, cursor.at, hashlib.sha256(cursor.data[: cursor.at]).hexdigest())


def _check_magic(path: Path, head: bytes, file_bytes: int) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: this is a Git LFS pointer, not the model; run `git lfs pull` where it came from")
    if not head.startswith(_MAGIC):
        raise ModelError(f"{path}: not a GGUF file (it starts with {head[:4]!r}, expected {_MAGIC!r})")
    if len(head) < 24:
        raise ModelError(f"{path}: the file is truncated: {file_bytes:,} B is less than a GGUF header")
    version = struct.unpack_from("<I", head, 4)[0]
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} (little endian) is not supported, expected 2 or 3")


class _Cursor:
    """A position in the header; running off the end of the bytes at hand is a ``_CutShort``."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def skip(self, nbytes: int) -> int:
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.data):
            raise _CutShort
        return start

    def scalar(self, code: str, nbytes: int) -> Any:
        return struct.unpack_from(code, self.data, self.skip(nbytes))[0]

    def count(self, of: str) -> int:
        number = int(self.scalar("<Q", 8))
        if number > _COUNT_LIMIT:
            raise ModelError(f"{self.path}: the header claims {number:,} {of}; the file is damaged")
        return number

    def string(self) -> str:
        length = int(self.scalar("<Q", 8))
        start = self.skip(length)
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(*_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: key {key} has unknown type {kind}; the file is damaged")
        item, length = int(self.scalar("<I", 4)), self.count(f"items in {key}")
        if item in _SCALARS:
            code, width = _SCALARS[item]
            start = self.skip(width * length)
            return list(struct.unpack_from(f"<{length}{code[1]}", self.data, start))
        if item == _STRING:
            return self._strings(length)
        return [self.value(item, key) for _ in range(length)]

    def _strings(self, count: int) -> list[str]:
        # The one hot loop of the header: a tokenizer has 10**5 strings.
        data, at, end = self.data, self.at, len(self.data)
        length_at: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            if at + 8 > end:
                break
            start = at + 8
            at = start + length_at(data, at)[0]
            strings.append(data[start:at].decode("utf-8", errors="replace"))
        self.at = at
        if len(strings) < count or at > end:
            raise _CutShort
        return strings


def _tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = int(cursor.scalar("<I", 4))
    if not 1 <= dimensions <= 4:
        raise ModelError(f"{cursor.path}: tensor {name} has {dimensions} dimensions, expected 1 to 4")
    shape = tuple(reversed([int(cursor.scalar("<Q", 8)) for _ in range(dimensions)]))
    return name, shape, int(cursor.scalar("<I", 4)), int(cursor.scalar("<Q", 8))


def _extent(path: Path, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> TensorInfo:
    kinds = _block_sizes()
    if type_number not in kinds:
        raise ModelError(f"{path}: tensor {name} has unknown type {type_number}")
    type_name, block, block_bytes = kinds[type_number]
    elements = 1
    for dimension in shape:
        elements *= dimension
    if elements == 0 or elements >= 1 << 48 or shape[-1] % block:
        raise ModelError(f"{path}: tensor {name} has shape {list(shape)}, not a multiple of {block} for {type_name}")
    return TensorInfo(name, shape, type_name, offset, elements // block * block_bytes)


@lru_cache(maxsize=1)
def _block_sizes() -> dict[int, tuple[str, int, int]]:
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, block, nbytes) for kind, (block, nbytes) in GGML_QUANT_SIZES.items()}
