"""Model folders from the Hugging Face hub: its local cache first, then the hub itself if it answers at once.

Knows huggingface_hub only. Never waits long: one request of a few seconds decides whether the hub can be reached.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dropmatch.errors import ModelNotFoundError

_REACH_SECONDS = 3.0
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_INDEX = "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"


def hub_snapshot(hub_id: str) -> Path:
    """The model's folder, from the local cache or downloaded. Raises ModelNotFoundError saying why there is none."""
    try:
        cached = cached_snapshot(hub_id)
    except HFValidationError as error:
        raise ModelNotFoundError(f"{hub_id!r} is no hub id.") from error
    if cached:
        return cached
    if reason := why_unreachable(hub_id):
        raise ModelNotFoundError(f"{hub_id} is not in the local hub cache, and {reason}.")
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(f"The hub did not give {hub_id}: {error}") from error


def hub_config(hub_id: str) -> dict[str, Any] | None:
    """The config.json of a hub id, from the local cache or downloaded; None if there is none to be had."""
    try:
        path: Any = huggingface_hub.try_to_load_from_cache(hub_id, "config.json")
        if not isinstance(path, str):
            if why_unreachable(hub_id):
                return None
            path = huggingface_hub.hf_hub_download(hub_id, "config.json")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def hub_head(hub_id: str) -> Path:
    """Folder of a draft head, from the local cache or downloaded. Unlike models, heads are often a pickle alone.
    Raises ModelNotFoundError."""
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
        if any(folder.glob("*.safetensors")) or (folder / _PICKLE).exists():
            return folder
    except LocalEntryNotFoundError:
        pass
    if reason := why_unreachable(hub_id):
        raise ModelNotFoundError(f"The weights of {hub_id} are not in the local hub cache, and {reason}.")
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", _PICKLE]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(f"The hub did not give {hub_id}: {error}") from error


def cached_snapshot(hub_id: str) -> Path | None:
    """The model's folder in the hub's local cache, if it is there with all its weights."""
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    # The cache also keeps folders of which only the config or the tokenizer was ever asked for.
    if not (folder / "config.json").exists():
        return None
    if (index := folder / _INDEX).exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
    else:
        shards = {"model.safetensors"}
    return folder if all((folder / shard).exists() for shard in shards) else None


def why_unreachable(hub_id: str) -> str | None:
    """None if the hub answers, whatever it says; otherwise the reason, for a message."""
    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    url = huggingface_hub.hf_hub_url(hub_id, "config.json")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None  # an answer: snapshot_download tells what is wrong, and sends the user's token
    except OSError as error:
        return f"the hub cannot be reached ({getattr(error, 'reason', error)})"
