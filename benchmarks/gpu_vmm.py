"""What moving bytes and mapping memory cost on a GPU: the figures every placement on it is planned with.

Copies go through the device as the engine's do, so their cost holds the calls' own. Mapping is timed call by call, the
driver asked directly, then as the device does it: a whole range made accessible, or unmapped, in one call.

    python -m benchmarks.gpu_vmm
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.machine import describe, heading, write
from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import check, load_driver

KIB, MIB = 1 << 10, 1 << 20
Copy = Callable[[int, int], None]
"""Copies some bytes at an offset, asynchronously."""

REPEATS = 5
RANGE_BYTES = 1024 * MIB
PINNED_CHUNKS = (64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, RANGE_BYTES)
PAGEABLE_CHUNKS = (64 * KIB, 2 * MIB, 16 * MIB, RANGE_BYTES)
MOVED_CHUNKS = (64 * KIB, 2 * MIB)
OVERLAPS = (256 * MIB, 2 * MIB, 64 * KIB)
HANDLE_BYTES = (2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, RANGE_BYTES)
GRANULE_UNITS = (1, 4, 16)
GRANULES = 256
LARGE_BYTES = 160 * MIB
ALIAS_GRANULES = 8
ALIAS_ADDRESSES = (1, 16, 48, 192)


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def summary(samples_s: list[float], per: int = 1) -> dict[str, float]:
    """Microseconds: median and 99th percentile of samples that each did ``per`` units of work."""
    ordered = sorted(1e6 * sample / per for sample in samples_s)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "samples": len(ordered),
    }


def rate(device: CudaDevice, nbytes: int, call: Callable[[], object], repeats: int = REPEATS) -> dict[str, float]:
    """GB/s (10^9) of a call that moves ``nbytes`` asynchronously: median of repeats after one to warm up."""

    def run() -> None:
        call()
        device.synchronize()

    run()
    return spread([nbytes / seconds(run) / 1e9 for _ in range(repeats)])


def spread(rates: list[float]) -> dict[str, float]:
    """Median, lowest and highest of rates in GB/s."""
    return {
        "gb_per_s": round(statistics.median(rates), 2),
        "lowest": round(min(rates), 2),
        "highest": round(max(rates), 2),
    }


def backed(device: CudaDevice, nbytes: int) -> int:
    """Addresses with memory behind them."""
    address = device.reserve(nbytes)
    device.map(address, device.create(nbytes // device.granularity))
    return address


def copies() -> list[dict[str, Any]]:
    """Bandwidth by kind of copy and size of chunk."""
    rows: list[dict[str, Any]] = []
    host = mmap.mmap(-1, RANGE_BYTES)
    source = ctypes.addressof(ctypes.c_char.from_buffer(host))
    ctypes.memset(source, 7, RANGE_BYTES)
    half = RANGE_BYTES // 2

    def add(kind: str, device: CudaDevice, copy: Copy, nbytes: int, chunk: int) -> None:
        def run() -> None:
            for at in range(0, nbytes, chunk):
                copy(at, chunk)

        rows.append({"copy": kind, "chunk_bytes": chunk, **rate(device, nbytes, run)})

    with closing(CudaDevice()) as device:
        target = backed(device, RANGE_BYTES)

        def copy_in(at: int, nbytes: int) -> None:
            device.copy_in(target + at, source + at, nbytes)

        def move_half(at: int, nbytes: int) -> None:
            device.move(target + half + at, target + at, nbytes)

        for chunk in PAGEABLE_CHUNKS:
            add("HtoD, pageable", device, copy_in, RANGE_BYTES, chunk)
        started = time.perf_counter()
        pinning = device.pin(source, RANGE_BYTES)
        pin_ms = 1e3 * (time.perf_counter() - started)
        if pinning.device_address is None:
            return [*rows, {"copy": f"not pinned: {pinning.reason}"}]
        mapped = pinning.device_address
        rows.append({"copy": "pinning memory already touched", "chunk_bytes": RANGE_BYTES, "ms": round(pin_ms, 1)})
        for chunk in PINNED_CHUNKS:
            add("HtoD, pinned", device, copy_in, RANGE_BYTES, chunk)
        add("mapped host memory, read by DMA", device, lambda at, n: device.move(target + at, mapped + at, n),
            RANGE_BYTES, RANGE_BYTES)  # fmt: skip
        for chunk in (*MOVED_CHUNKS, half):
            add("DtoD", device, move_half, half, chunk)
        for distance in OVERLAPS:

            def move_up(at: int, nbytes: int, distance: int = distance) -> None:
                device.move(target + distance + at, target + at, nbytes)

            add(f"DtoD, up by {distance // KIB:,} KiB within the range", device, move_up, half, half)
        device.unpin(source)
    return rows


def scattered(device: CudaDevice, nbytes: int) -> int:
    """Addresses with memory behind them whose neighbours in address are no neighbours in memory."""
    address, count = device.reserve(nbytes), nbytes // device.granularity
    granules = device.create(2 * count)
    device.release(granules[1::2])
    kept = granules[::2]
    random.Random(0).shuffle(kept)
    device.map(address, kept)
    return address


def handle_sizes() -> list[dict[str, Any]]:
    """What the size and order of the handles behind a range do to work on it.

    The cases take turns, so that drift hits all of them.
    """
    half = RANGE_BYTES // 2
    cases = [(size, order) for size in HANDLE_BYTES for order in (backed, scattered) if order is backed or size <= half]
    with ExitStack() as stack:
        devices = [stack.enter_context(closing(CudaDevice(size))) for size, _ in cases]
        places = [order(device, RANGE_BYTES) for device, (_, order) in zip(devices, cases, strict=True)]
        moved: list[list[float]] = [[] for _ in cases]
        filled: list[list[float]] = [[] for _ in cases]
        for _ in range(REPEATS):
            for device, at, moves, fills in zip(devices, places, moved, filled, strict=True):
                move, fill = partial(device.move, at + half, at, half), partial(device.fill, at, RANGE_BYTES, 1)
                moves.append(rate(device, half, move, 1)["gb_per_s"])
                fills.append(rate(device, RANGE_BYTES, fill, 1)["gb_per_s"])
    return [
        {
            "handle_bytes": size,
            "order": "as created" if order is backed else "scattered",
            "dtod": spread(moves),
            "fill": spread(fills),
        }
        for (size, order), moves, fills in zip(cases, moved, filled, strict=True)
    ]


def calls(granule_bytes: int) -> dict[str, Any]:
    """Each driver call for each of many granules, then the two calls that can take a whole range."""
    cu = load_driver()
    with closing(CudaDevice(granule_bytes)) as device:
        base = device.reserve(2 * GRANULES * granule_bytes)
        properties, access = memory_properties(cu)
        ats = range(base, base + GRANULES * granule_bytes, granule_bytes)

        def timed(function: Any, arguments: Callable[[int], tuple[Any, ...]]) -> tuple[list[float], list[Any]]:
            samples, results = [], []
            for index in range(GRANULES):
                given = arguments(index)
                started = time.perf_counter()
                results.append(check(function, *given))
                samples.append(time.perf_counter() - started)
            return samples, results

        found: dict[str, Any] = {"granule_bytes": granule_bytes}
        create, handles = timed(cu.cuMemCreate, lambda i: (granule_bytes, properties, 0))
        mapping, _ = timed(cu.cuMemMap, lambda i: (ats[i], granule_bytes, 0, handles[i], 0))
        allow, _ = timed(cu.cuMemSetAccess, lambda i: (ats[i], granule_bytes, [access], 1))
        unmap, _ = timed(cu.cuMemUnmap, lambda i: (ats[i], granule_bytes))
        for at, handle in zip(ats, handles, strict=True):
            check(cu.cuMemMap, at, granule_bytes, 0, handle, 0)
        whole = GRANULES * granule_bytes
        allow_all = seconds(lambda: check(cu.cuMemSetAccess, base, whole, [access], 1))
        unmap_all = seconds(lambda: check(cu.cuMemUnmap, base, whole))
        release, _ = timed(cu.cuMemRelease, lambda i: (handles[i],))
        for name, samples in (
            ("cuMemCreate", create),
            ("cuMemMap", mapping),
            ("cuMemSetAccess", allow),
            ("cuMemUnmap", unmap),
            ("cuMemRelease", release),
        ):
            found[name] = summary(samples)
        found[f"cuMemSetAccess, one call for {GRANULES}"] = summary([allow_all], GRANULES)
        found[f"cuMemUnmap, one call for {GRANULES}"] = summary([unmap_all], GRANULES)
        return found


def memory_properties(cu: Any) -> tuple[Any, Any]:
    """What cuMemCreate and cuMemSetAccess are told: pinned memory of GPU 0, to be read and written."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    access = cu.CUmemAccessDesc()
    access.location = properties.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return properties, access


def one_range(granule_bytes: int, nbytes: int) -> dict[str, Any]:
    """A range made, mapped, unmapped and freed through the device: total microseconds by granule size."""
    with closing(CudaDevice(granule_bytes)) as device:
        count = nbytes // granule_bytes
        address = device.reserve(nbytes)
        samples: dict[str, list[float]] = {"create": [], "map": [], "unmap": [], "release": []}
        for _ in range(REPEATS + 1):
            times = [time.perf_counter()]
            granules = device.create(count)
            times.append(time.perf_counter())
            device.map(address, granules)
            times.append(time.perf_counter())
            device.unmap(address, count)
            times.append(time.perf_counter())
            device.release(granules)
            times.append(time.perf_counter())
            for values, (start, stop) in zip(samples.values(), pairwise(times), strict=True):
                values.append(stop - start)
        found = {name: summary(values[1:])["median_us"] for name, values in samples.items()}
        return {"granule_bytes": granule_bytes, "granules": count, "bytes": nbytes, **found}


def aliases(addresses: int) -> dict[str, Any]:
    """The granules of one ring slot put behind many addresses, and taken away again."""
    with closing(CudaDevice()) as device:
        nbytes = ALIAS_GRANULES * device.granularity
        granules = device.create(ALIAS_GRANULES)
        places = [device.reserve(nbytes) for _ in range(addresses)]

        def map_all() -> None:
            for place in places:
                device.map(place, granules)

        def unmap_all() -> None:
            for place in places:
                device.unmap(place, ALIAS_GRANULES)

        free, taken = device.free_bytes(), 0
        mapping: list[float] = []
        unmapping: list[float] = []
        for _ in range(REPEATS + 1):
            mapping.append(seconds(map_all))
            taken = free - device.free_bytes()
            unmapping.append(seconds(unmap_all))
        return {
            "addresses": addresses,
            "granules": ALIAS_GRANULES,
            "map_us": summary(mapping[1:], addresses)["median_us"],
            "unmap_us": summary(unmapping[1:], addresses)["median_us"],
            "map_all_ms": round(1e3 * statistics.median(mapping[1:]), 2),
            "memory_taken_by_mapping_bytes": taken,
        }


def report(result: dict[str, Any]) -> str:
    """The result as markdown tables."""
    lines = ["## Copies", "", "| copy | chunk | GB/s (lowest, highest) |", "|---|---|---|"]
    for row in result["copies"]:
        chunk = f"{row.get('chunk_bytes', 0) // KIB:,} KiB"
        shown = f"{row['ms']} ms" if "ms" in row else "-"
        if "gb_per_s" in row:
            shown = f"{row['gb_per_s']} ({row['lowest']}, {row['highest']})"
        lines.append(f"| {row['copy']} | {chunk} | {shown} |")
    lines += ["", f"## {RANGE_BYTES // MIB} MiB by its handles, GB/s (lowest, highest)", ""]
    lines += ["| handle | order | DtoD | fill |", "|---|---|---|---|"]
    for row in result["handle_sizes"]:
        cells = [f"{cell['gb_per_s']} ({cell['lowest']}, {cell['highest']})" for cell in (row["dtod"], row["fill"])]
        lines.append(f"| {row['handle_bytes'] // MIB} MiB | {row['order']} | {cells[0]} | {cells[1]} |")
    names = [name for name in result["calls"][0] if name != "granule_bytes"]
    sizes = " | ".join(f"{found['granule_bytes'] // MIB} MiB" for found in result["calls"])
    lines += ["", "## Driver calls, us a granule: median (99th percentile)", "", f"| call | {sizes} |"]
    lines.append("|---|" + "---|" * len(result["calls"]))
    for name in names:
        cells = []
        for found in result["calls"]:
            cell = found[name]
            tail = f" ({cell['p99_us']})" if cell["samples"] > 1 else ""
            cells.append(f"{cell['median_us']}{tail}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"## {LARGE_BYTES // MIB} MiB through the device, us in all", ""]
    lines += ["| granules | create | map | unmap | release |", "|---|---|---|---|---|"]
    for row in result["one_range"]:
        what = f"{row['granules']} of {row['granule_bytes'] // MIB} MiB"
        lines.append(f"| {what} | {row['create']} | {row['map']} | {row['unmap']} | {row['release']} |")
    lines += ["", f"## {ALIAS_GRANULES} granules at many addresses, through the device", ""]
    lines += ["| addresses | map, us an address | unmap, us an address | map all, ms | memory taken, B |"]
    lines.append("|---|---|---|---|---|")
    for row in result["aliases"]:
        lines.append(
            f"| {row['addresses']} | {row['map_us']} | {row['unmap_us']} | {row['map_all_ms']} | "
            f"{row['memory_taken_by_mapping_bytes']:,} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the result."""
    argparse.ArgumentParser(prog="python -m benchmarks.gpu_vmm", description=__doc__).parse_args()
    where = describe()
    # One device stays open throughout, so that opening the others does not start the GPU's context anew.
    with closing(CudaDevice()) as first:
        unit = first.granularity
        result = {
            "where": where,
            "unit_bytes": unit,
            "copies": copies(),
            "handle_sizes": handle_sizes(),
            "calls": [calls(units * unit) for units in GRANULE_UNITS],
            "one_range": [one_range(size, LARGE_BYTES) for size in (unit, 16 * unit, LARGE_BYTES)],
            "aliases": [aliases(count) for count in ALIAS_ADDRESSES],
        }
    text = heading("Copies and memory mapping on the GPU", where) + report(result)
    print(text)
    print("written:", write("gpu_vmm", result, text))


if __name__ == "__main__":
    main()
