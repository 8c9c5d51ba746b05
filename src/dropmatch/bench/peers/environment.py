"""A virtual environment in the cache folder that holds the peers' packages at pinned versions, and nothing of ours.

What dropmatch runs on (torch, transformers) is seen through from its own environment, so that every program of a
measurement multiplies with the same build; the peers themselves, and what only they need, are installed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from dropmatch.errors import ConfigError
from dropmatch.provenance import cache_dir

PEERS = {"economize": "0.3.2", "flashspec": "0.3.1"}
"""Packages on PyPI that can be measured, with the version that `child` was written for."""
ENVIRONMENT_VARIABLE = "DROPMATCH_PEERS_VENV"
_SHARED = ("torch", "transformers")  # never installed here, so that a peer cannot bring another version
_PINNED = ("pydantic==2.14.4",)  # what a peer needs beside what dropmatch brings

Install = Callable[[Sequence[str]], str | None]
"""A command line -> None, or why it failed."""


def peers_folder() -> Path:
    """Where the environment lies: $DROPMATCH_PEERS_VENV, or a folder in the cache. Not created."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(chosen).expanduser() if chosen else cache_dir() / "peers-venv"


def ready_environment(
    peers: Sequence[str], *, folder: Path | None = None, install: Install | None = None
) -> tuple[Path, dict[str, str]]:
    """Make the environment on first use and install what is missing of these peers.

    Returns its interpreter, and why a peer could not be installed, by name. install: runs one pip command. Safe against
    a second process. Raises ConfigError where no environment can be made at all.
    """
    folder = folder or peers_folder()
    install = install or _run_pip
    python = folder / ("Scripts" if os.name == "nt" else "bin") / ("python.exe" if os.name == "nt" else "python")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            stamp = _read_stamp(folder)
            if stamp.get("base") != _base():
                stamp = {"base": _base(), "installed": {}}
                _make(folder)
            failures = {}
            for peer in peers:
                pinned = f"{peer}=={PEERS[peer]}"
                if stamp["installed"].get(peer) == PEERS[peer]:
                    continue
                command = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
                failure = install([*command, "--constraint", str(folder / "constraints.txt"), pinned])
                if failure is not None:
                    failures[peer] = f"{pinned} could not be installed: {failure}"
                    continue
                stamp["installed"][peer] = PEERS[peer]
            (folder / "dropmatch.json").write_text(json.dumps(stamp), encoding="utf-8")
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"No environment for the peers could be made in {folder} ({error}). Name another folder in "
            f"{ENVIRONMENT_VARIABLE}, install Python's venv module, or measure without them: --peers none."
        ) from error
    return python, failures


def _base() -> list[str]:
    """What the environment was made for: this interpreter, where its packages lie, and the versions shared."""
    return [sys.version, *_own_packages(), *(f"{name}=={version(name)}" for name in _SHARED), *_PINNED]


def _own_packages() -> list[str]:
    """Folders of this interpreter's packages, and of the shared ones where they lie elsewhere (in a user's folder)."""
    folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    for name in _SHARED:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))


def _read_stamp(folder: Path) -> dict[str, Any]:
    try:
        stamp = json.loads((folder / "dropmatch.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _make(folder: Path) -> None:
    """A fresh environment that finds our packages behind its own."""
    venv.create(folder, with_pip=True, clear=True, symlinks=os.name != "nt")
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "nt_venv" if os.name == "nt" else "posix_venv", paths))
    (packages / "dropmatch-shared.pth").write_text("\n".join(_own_packages()) + "\n", encoding="utf-8")
    constraints = [*(f"{name}=={version(name)}" for name in _SHARED), *_PINNED]
    (folder / "constraints.txt").write_text("\n".join(constraints) + "\n", encoding="utf-8")


def _run_pip(command: Sequence[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
