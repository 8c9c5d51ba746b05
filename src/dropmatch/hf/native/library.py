"""Compiles kernels.cpp with the machine's own compiler for its own CPU, once, and loads it.

A fast path only: whoever finds no library here multiplies with torch's own kernels. Plain C functions through ctypes
rather than a torch extension: those compile in a second instead of forty, and need no headers of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from dropmatch.provenance import cache_dir

VARIABLE = "DROPMATCH_NATIVE"
_SOURCE = Path(__file__).with_name("kernels.cpp")
_READ = ("kernels.cpp", "avx512.h", "avx2.h")
_FLAGS = [
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-mavx2",
    "-mfma",
]
_AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
_COMPILE_SECONDS = 120
_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "set_num_threads": ([_INT], None),
    "linear_bf16": ([_POINTER] * 5 + [_COUNT] * 4 + [_INT], None),
    "linear_int4": ([_POINTER] * 5 + [_COUNT] * 3 + [_INT], None),
    "pack_int4": ([_POINTER] * 4 + [_COUNT] * 2, None),
    "rms_norm": ([_POINTER] * 2 + [ctypes.c_float, _POINTER] + [_COUNT] * 2, None),
    "rotate": ([_POINTER] * 3 + [_COUNT] * 4, None),
    "silu_product": ([_POINTER] * 2 + [_COUNT] * 2, None),
}


class NativeUnavailableError(Exception):
    """The message says why this machine has no compiled kernels."""


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where `why_unavailable` says why not. The first call may compile."""
    return _load()[0]


def why_unavailable() -> str | None:
    """Why there are no compiled kernels here; None if there are."""
    return _load()[1]


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        _check_machine()
        return _open(_compiled(_compiler())), None
    except NativeUnavailableError as error:
        return None, str(error)


def _check_machine() -> None:
    if os.environ.get(VARIABLE, "1").lower() in {"0", "off", "no", "false"}:
        raise NativeUnavailableError(f"{VARIABLE} turns them off")
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "AMD64"}:
        raise NativeUnavailableError("they are for Linux on x86-64")
    if not torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512")):
        raise NativeUnavailableError("torch uses no AVX2 here")


def has_avx512() -> bool:
    """Whether this CPU has AVX-512 with VNNI, and torch has not been told to leave it alone (ATEN_CPU_CAPABILITY)."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and torch.cpu._is_vnni_supported()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailableError("there is no C++ compiler (install g++, or set CXX)")


def _compiled(compiler: str) -> Path:
    """The shared library in the cache folder, compiled if it is not there."""
    command = [compiler, *_FLAGS, *(_AVX512_FLAGS if has_avx512() else [])]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_COMPILE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"{compiler} does not run: {error}") from error
    folder = cache_dir() / "native"
    try:
        sources = [_SOURCE.with_name(name).read_bytes() for name in _READ]
        key = hashlib.sha256(b"\0".join([*sources, " ".join(command).encode(), version.stdout]))
        path = folder / f"kernels-{key.hexdigest()[:16]}.so"
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:  # so that the move is atomic
            made = Path(beside) / path.name
            done = subprocess.run(
                [*command, str(_SOURCE), "-o", str(made)], capture_output=True, timeout=_COMPILE_SECONDS
            )
            if done.returncode:
                said = done.stderr.decode(errors="replace")
                first = next((line for line in said.splitlines() if "error" in line), said.strip())
                raise NativeUnavailableError(f"{compiler} does not compile them: {first}")
            made.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"they cannot be compiled into {folder}: {error}") from error
    return path


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{path} cannot be loaded (delete it to compile anew): {error}") from error
    # Two OpenMP runtimes in one process would each keep threads spinning: ours has to be torch's. Asked through ours,
    # which sets this thread's number only; torch's would set that of threads that start meanwhile too.
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            library.set_num_threads(count)
            if torch.get_num_threads() != count:
                raise NativeUnavailableError("torch brings an OpenMP runtime that they do not share")
    finally:
        library.set_num_threads(before)
    return library
