"""From a name to the folder of an EAGLE-3 head: a local folder, a hub id, or the head that the package carries."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dropmatch.eagle3.checkpoint import is_eagle3_folder
from dropmatch.eagle3.settings import is_eagle3
from dropmatch.errors import ModelNotFoundError
from dropmatch.hf.hub import hub_config, hub_head
from dropmatch.hf.packages import PACKAGED_MODELS

SHIPPED = "eagle3"
"""The name under which `draft` means the package's own head for the target."""

# pair -> folder below dropmatch/data
_SHIPPED_HEADS = {"small": "eagle3-smollm2-135m"}


def find_head(name: str) -> Path | None:
    """Folder of the head that a folder or hub id names, fetched if need be; None if it is something else.

    Raises UnsupportedModelError for speculators of other kinds, ModelNotFoundError if the hub has a head but does not
    give it.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path if is_eagle3_folder(path) else None
    packaged = {*PACKAGED_MODELS, *(model.hub_id.lower() for model in PACKAGED_MODELS.values())}
    if name.lower() in packaged or path.suffix == ".gguf":
        return None  # a model for sure, so the hub need not be asked
    config = hub_config(name)
    return hub_head(name) if config is not None and is_eagle3(config) else None


def shipped_head(pair: str) -> Path | None:
    """Folder of the head that this installation carries for a named pair; None without one."""
    if pair not in _SHIPPED_HEADS:
        return None
    folder = Path(str(resources.files("dropmatch"))) / "data" / _SHIPPED_HEADS[pair]
    return folder if is_eagle3_folder(folder) else None


def require_shipped_head(pair: str) -> Path:
    """`shipped_head`, or ModelNotFoundError saying what to do."""
    folder = shipped_head(pair)
    if folder is not None:
        return folder
    if pair not in _SHIPPED_HEADS:
        raise ModelNotFoundError(
            f"draft={SHIPPED!r} means the head that dropmatch carries, and there is one for target "
            f"{' or '.join(map(repr, _SHIPPED_HEADS))} only, not for {pair!r}. Name the folder or hub id of a head."
        )
    raise ModelNotFoundError(
        f"This installation carries no EAGLE-3 head for {pair!r} (dropmatch/data/{_SHIPPED_HEADS[pair]}). Train one "
        f"with `dropmatch train eagle3 --target {pair}` and name its folder, or use draft='ngram'."
    )
