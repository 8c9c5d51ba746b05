"""Judge heads in files: a folder of ours, or the form that Auto-Judge exports for vLLM. Pickles are refused.

Ours: judge.safetensors with float64 mean, scale, weight [D] and bias [], and judge.json with the rest. The exported
form, as .safetensors, .npz or .json: mean, scale, weights, bias and thresholds (features are then the target's state).
"""

from __future__ import annotations

import json
import math
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dropmatch.core.judge import FEATURES, JudgeHead
from dropmatch.errors import ConfigError, DataError, IntegrityError

KIND, FORMAT = "dropmatch-judge", 1
_JSON, _TENSORS = "judge.json", "judge.safetensors"
_READABLE = (".safetensors", ".npz", ".json")
_MOST_BYTES = 64 << 20  # a head is a few numbers per coordinate


def save_judge(head: JudgeHead, folder: Path, info: Mapping[str, Any]) -> None:
    """Write a head. info: how it was trained, kept beside it. The folder's own files are replaced together."""
    described = {
        "kind": KIND,
        "format": FORMAT,
        "features": head.features,
        "draft_size": head.draft_size,
        "target_size": head.target_size,
        "thresholds": list(head.thresholds),
        **info,
    }
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: getattr(head, name).double().contiguous() for name in ("mean", "scale", "weight")}
    save_file({**tensors, "bias": torch.tensor(head.bias, dtype=torch.float64)}, partial / _TENSORS)
    text = json.dumps(described, indent=1, allow_nan=False) + "\n"
    (partial / _JSON).write_text(text, encoding="utf-8")
    for name in (_TENSORS, _JSON):
        (partial / name).replace(folder / name)
    partial.rmdir()


def load_judge(path: str | Path) -> JudgeHead:
    """A head from a folder of ours or a file in the exported form. Nothing of a file is run.

    Raises DataError if there is nothing there, IntegrityError naming the file and what is wrong with it.
    """
    path = Path(path)
    if path.name in (_JSON, _TENSORS) and all((path.parent / name).is_file() for name in (_JSON, _TENSORS)):
        path = path.parent  # one file of a folder of ours
    if path.is_dir():
        described = judge_info(path)
        tensors = _read_safetensors(path / _TENSORS)
        return head_from(
            tensors,
            where=str(path),
            weight="weight",
            features=described["features"],
            draft_size=described["draft_size"],
            thresholds=described["thresholds"],
        )
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the folder of a judge, or a file in the exported form.")
    arrays = _read_exported(path)
    return head_from(arrays, where=str(path), weight="weights", thresholds=arrays.get("thresholds", ()))


def judge_info(folder: Path) -> dict[str, Any]:
    """What judge.json says. Raises DataError, IntegrityError."""
    path = folder / _JSON
    if not path.is_file():
        raise DataError(f"{folder} holds no judge: {_JSON} is missing.")
    described = _read_json(path)
    if described.get("kind") != KIND or described.get("format") != FORMAT:
        raise IntegrityError(f"{path} is no judge of format {FORMAT} (kind {described.get('kind')!r}).")
    missing = [key for key in ("features", "draft_size", "thresholds") if key not in described]
    if missing:
        raise IntegrityError(f"{path}: {missing[0]!r} is missing.")
    return described


def head_from(
    arrays: Mapping[str, Any],
    *,
    where: str,
    weight: str,
    features: str = "DT",
    draft_size: int = 0,
    thresholds: Any = (),
) -> JudgeHead:
    """A checked head from arrays by name. where: the file, for messages; weight: under which name the weights lie."""
    missing = [name for name in ("mean", "scale", weight, "bias") if name not in arrays]
    if missing:
        raise IntegrityError(f"{where}: {missing[0]!r} is missing. It holds {', '.join(sorted(arrays)) or 'nothing'}.")
    if features not in FEATURES:
        raise IntegrityError(f"{where}: 'features' is {features!r}. Allowed: {', '.join(FEATURES)}.")
    if isinstance(draft_size, bool) or not isinstance(draft_size, int):
        raise IntegrityError(f"{where}: 'draft_size' is {draft_size!r} and no whole number.")
    bias = _row(arrays["bias"], "bias", where)
    if bias.numel() != 1:
        raise IntegrityError(f"{where}: 'bias' holds {bias.numel()} numbers, and it should be one.")
    try:
        return JudgeHead(
            mean=_row(arrays["mean"], "mean", where),
            scale=_row(arrays["scale"], "scale", where),
            weight=_row(arrays[weight], weight, where),
            bias=float(bias),
            features=features,
            draft_size=draft_size,
            thresholds=tuple(_row(thresholds, "thresholds", where).tolist()),
            name=Path(where).name,
        )
    except ConfigError as error:
        raise IntegrityError(f"{where}: {error}") from error


def _row(values: Any, name: str, where: str) -> Tensor:
    """Numbers as one list of float64, [1, D] as [D] and a number as a list of one."""
    try:
        tensor = torch.as_tensor(np.asarray(values, dtype=np.float64)) if not isinstance(values, Tensor) else values
    except (TypeError, ValueError) as error:
        raise IntegrityError(f"{where}: {name!r} does not hold numbers ({error}).") from error
    if not (tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64)):
        raise IntegrityError(f"{where}: {name!r} holds {tensor.dtype}, and numbers are needed.")
    tensor = tensor.double()
    if tensor.dim() == 0 or (tensor.dim() == 2 and tensor.shape[0] == 1):
        tensor = tensor.reshape(-1)
    return tensor


def _read_exported(path: Path) -> Mapping[str, Any]:
    """Arrays by name of a file in the exported form."""
    if path.stat().st_size > _MOST_BYTES:
        raise IntegrityError(f"{path} has {path.stat().st_size >> 20} MiB, and a judge is far smaller.")
    if path.suffix not in _READABLE:
        raise IntegrityError(
            f"{path} is not opened: judges are read from folders of ours and from {', '.join(_READABLE)} files. "
            "If it is a pickle, loading it could run anything that its author wanted: "
            f"`dropmatch train convert-judge {path.name} FOLDER` reads the numbers out of one without running it."
        )
    if path.suffix == ".json":
        return _read_json(path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_npz(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path} holds no JSON object.")
    return value


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"{path.parent} holds no judge: {path.name} is missing.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path} cannot be read as safetensors ({error}).") from error


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise IntegrityError(f"{path} cannot be read as .npz without pickled objects ({error}).") from error


def even_quantiles(values: Sequence[float], count: int) -> tuple[float, ...]:
    """count quantiles of values from the lowest to the highest at even steps; 26 are those at 0, 0.04, ..., 1."""
    if count < 2 or not len(values) or not all(map(math.isfinite, values)):
        raise ConfigError(f"{count} quantiles of {len(values)} values were asked for. Give at least 2 of at least 1.")
    return tuple(np.quantile(np.asarray(values, float), np.linspace(0.0, 1.0, count)).tolist())
