"""Where results and weights come from: the cache folder, and the facts written beside every result.

A leaf: imports only the standard library and platformdirs, torch and transformers lazily.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from platformdirs import user_cache_dir

CACHE_VARIABLE = "DROPMATCH_CACHE"
_SAMPLE = 64  # bytes amid each tensor: any training changes some of them
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def cache_dir() -> Path:
    """The folder for downloaded and converted weights: $DROPMATCH_CACHE, or the user's cache folder. Not created."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("dropmatch"))


def weights_digest(folder: Path) -> str:
    """Tells the model in a folder from another one put in its place. Reads the config and a few bytes amid each tensor,
    so it is quick for any size; it sees a model trained further, and is no proof against forgery."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in _WEIGHTS:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            for sample in _samples(path):
                digest.update(sample)
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[bytes]:
    """The header and bytes amid each tensor of a safetensors file; of others, bytes at even distances."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
            yield header
            spans = (entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
            places = [8 + length + (begin + end - _SAMPLE) // 2 for begin, end in spans]
        else:
            places = [size * i // 1024 for i in range(1024)]
        for place in places:
            file.seek(max(0, place))
            yield file.read(_SAMPLE)


def collect(argv: Sequence[str] | None = None, *, device: str | None = None) -> dict[str, object]:
    """Facts that a reader needs to repeat a result, ready for json.dumps.

    argv: the command line, sys.argv by default. device: where the model ran; the first CUDA device or the CPU if None.
    """
    import torch

    commit, is_dirty = _git_state()
    return {
        "command": _command(sys.argv if argv is None else argv),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "is_dirty": is_dirty,
        "dropmatch": _version("dropmatch"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "device": _device_name(device),
        "num_threads": torch.get_num_threads(),
        "cpu": _cpu_model(),
        "kernels": _kernels(),
        "platform": platform.platform(),
    }


def _kernels() -> str | None:
    """Whether linear layers on a CPU multiply by our own kernels, or why not; None where nothing was loaded."""
    library = sys.modules.get("dropmatch.hf.native.library")  # a leaf imports nothing of the package
    return None if library is None else library.why_unavailable() or "own"


def _command(argv: Sequence[str]) -> str:
    """The command line as one would type it: the program by its name alone, wherever it is installed."""
    return shlex.join([*(Path(program).name for program in argv[:1]), *argv[1:]])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout this file lies in; (None, None) for an installed package."""
    folder = Path(__file__).resolve().parent
    # An installed copy may lie in a virtual environment inside some other project's checkout: ask for this very file.
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return _git(folder, "rev-parse", "HEAD"), None if status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, or None where git or the checkout is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _device_name(device: str | None) -> str:
    import torch

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type


def _cpu_model() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
