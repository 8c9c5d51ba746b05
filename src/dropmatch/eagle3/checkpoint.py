"""EAGLE-3 checkpoints on disk, both families: read, checked tensor by tensor, and written.

Files come from strangers: pickles go through torch's weights-only loader, no size is taken from a config before the
tensors were compared with it, and nothing is built from a file that does not fit the target.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dropmatch.eagle3.model import Eagle3Head
from dropmatch.eagle3.settings import Family, HeadSettings, config_json, is_eagle3, parse_settings
from dropmatch.errors import ConfigError, IntegrityError, ModelNotFoundError, UnsupportedModelError
from dropmatch.hf.rotary import rotary_frequencies

_OFFICIAL_LAYER, _OWN_LAYER = "midlayer.", "layers.0."
_EMBEDDING = "embed_tokens.weight"
HEAD_FILES = frozenset({"config.json", "model.safetensors", "training.json"})
"""What a folder that `save_head` wrote may hold."""
_WEIGHT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a head must fit: the target's hidden size, numbers of layers and logits, and input embedding [V, Ht]."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    embedding: Tensor

    @classmethod
    def of(cls, model: Any) -> TargetFacts:
        """The facts of an `HFModel`."""
        return cls(
            hidden_size=int(model.anatomy.config.hidden_size),
            num_layers=len(model.anatomy.layers),
            vocab_size=model.vocab_size,
            embedding=model.model.get_input_embeddings().weight.detach(),
        )


def is_eagle3_folder(folder: Path) -> bool:
    """Whether a folder holds an EAGLE-3 head, judged by its config.json. False where there is no readable one."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and is_eagle3(config)


def read_settings(folder: Path, *, tap_offset: int | None = None) -> HeadSettings:
    """The settings of a checkpoint. tap_offset: see `parse_settings`. Raises ModelNotFoundError, IntegrityError,
    UnsupportedModelError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{folder} holds no EAGLE-3 head: {path.name} cannot be read ({error}).") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is damaged: {error}. Fetch the head again.") from error
    if not isinstance(config, dict) or not is_eagle3(config):
        raise UnsupportedModelError(
            f"{path} is not that of an EAGLE-3 head: it has neither draft_vocab_size nor speculators_model_type."
        )
    return parse_settings(config, str(path), tap_offset=tap_offset)


def load_head(
    folder: Path, target: TargetFacts, *, dtype: torch.dtype, device: torch.device, tap_offset: int | None = None
) -> Eagle3Head:
    """A head ready to draft for a target: frozen, in dtype, its embedding shared with the target where they are equal.

    Raises IntegrityError naming the tensor that is missing, misshapen or out of range, UnsupportedModelError if the
    head is for another target, ModelNotFoundError without weights, ConfigError if dtype cannot hold a weight.
    """
    settings = read_settings(folder, tap_offset=tap_offset)
    if settings.target_hidden_size != target.hidden_size:
        raise UnsupportedModelError(
            f"{folder} reads hidden states of width {settings.target_hidden_size} (fc.weight), and the target's are "
            f"{target.hidden_size} wide. Use the head with its own target."
        )
    settings = replace(settings, tap_layers=settings.taps_of(target.num_layers))
    tensors = read_tensors(folder)
    target_ids = _target_ids(tensors, settings, target, folder)
    embedding = _embedding(tensors, settings, target, folder)
    frequencies, scale = rotary_frequencies(settings.rope, settings.head_dim, settings.max_positions)
    head = blank_head(settings, embedding, target_ids, frequencies, scale)
    weights = {}
    for name, parameter in head.named_parameters():
        weight = _checked(tensors, name, tuple(parameter.shape), folder).to(device, dtype)
        if not bool(weight.isfinite().all()):
            raise ConfigError(f"{_shown(name)} in {folder} has values that {dtype} cannot hold. Give dtype='float32'.")
        weights[name] = weight
    head.load_state_dict(weights, assign=True)
    head.inv_freq, head.target_ids = frequencies.to(device), target_ids.to(device)
    head.embedding = embedding if embedding is target.embedding else embedding.to(device, dtype)
    return head.requires_grad_(False).eval()


def blank_head(
    settings: HeadSettings, embedding: Tensor, target_ids: Tensor, frequencies: Tensor, scale: float
) -> Eagle3Head:
    """A head whose parameters are still without memory, so that no size in a file can cost any."""
    with torch.device("meta"):
        return Eagle3Head(settings, embedding, target_ids, frequencies, scale)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint under the speculators format's names, safetensors before pickle."""
    files = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in (_read_pickle(path) if path.suffix == ".bin" else _read_safetensors(path)).items():
            is_official = name.startswith(_OFFICIAL_LAYER)
            own_name = _OWN_LAYER + name.removeprefix(_OFFICIAL_LAYER) if is_official else name
            if own_name in tensors:
                raise IntegrityError(f"{folder} holds the tensor {_shown(own_name)} twice. Fetch the head again.")
            tensors[own_name] = tensor
    return tensors


def save_head(
    head: Eagle3Head,
    folder: Path,
    *,
    family: Family = "official",
    target_name: str | None = None,
    dtype: torch.dtype = torch.float16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint: config.json, model.safetensors and, of `extra`, training.json. The folder is replaced whole.

    target_name: where others find the target, a hub id or a folder; the speculators package then loads it too.
    Raises ConfigError if the family cannot say what the head is, if a weight is too large for dtype, or if the folder
    cannot be written, as on a full disk; what was there before is then still there.
    """
    settings = replace(head.settings, family=family)
    config = config_json(settings, target_name=target_name, dtype=str(dtype).removeprefix("torch."))
    tensors = {name: tensor.detach().to(dtype) for name, tensor in head.named_parameters()}
    if family == "official":
        tensors = {_file_name(name, family): tensor for name, tensor in tensors.items()}
    else:
        tensors[_EMBEDDING] = head.embedding.to(dtype)
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{name} has values that {dtype} cannot hold. Save the head in float32.")
    if settings.is_reduced:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(settings.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    partial, replaced = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".replaced"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        if extra is not None:
            report = json.dumps(extra, indent=1, allow_nan=False) + "\n"
            (partial / "training.json").write_text(report, encoding="utf-8")
        save_file(contiguous, partial / "model.safetensors", metadata={"format": "pt"})
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be written ({error}). Make room, or name another place.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _file_name(name: str, family: Family) -> str:
    """A parameter's name in a family's files."""
    if family == "official" and name.startswith(_OWN_LAYER):
        return _OFFICIAL_LAYER + name.removeprefix(_OWN_LAYER)
    return name


def _weight_files(folder: Path) -> list[Path]:
    whole, index, pickled = (
        folder / name for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    )
    if whole.is_file():
        return [whole]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise IntegrityError(f"{index} is damaged: {error!r}. Fetch the head again.") from error
        for shard in shards:
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise IntegrityError(f"{index} names {shard!r}, which is no safetensors file of its folder.")
            if not (folder / shard).is_file():
                raise IntegrityError(f"{folder} lacks {shard}, which its index names. Fetch the head again.")
        return [folder / shard for shard in shards]
    if pickled.is_file():
        return [pickled]
    raise ModelNotFoundError(f"{folder} holds no weights: neither {whole.name}, {index.name} nor {pickled.name}.")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}. Fetch the head again.") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise IntegrityError(
            f"{path} holds more than tensors and was not read, since a pickle can run code "
            f"({reason[-1] if reason else error!r}). Ask for the head as safetensors."
        ) from error
    except Exception as error:  # what is no pickle can fail in any way
        raise IntegrityError(f"{path} cannot be read: {error}. Fetch the head again.") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise IntegrityError(f"{path} is no dictionary of named tensors.")
    return loaded


def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    """A weight of the expected shape, finite. Raises IntegrityError naming it."""
    tensor = tensors.get(name)
    shown = _shown(name)
    if tensor is None:
        raise IntegrityError(f"{folder} lacks the tensor {shown}. Fetch the head again.")
    _require_plain(tensor, shown, folder)
    if tuple(tensor.shape) != shape:
        raise IntegrityError(f"{shown} in {folder} has shape {list(tensor.shape)}; its config asks for {list(shape)}.")
    if tensor.dtype not in _WEIGHT_TYPES:
        raise IntegrityError(
            f"{shown} in {folder} is of type {tensor.dtype}; a floating-point type of at least 16 bits is needed."
        )
    if not bool(tensor.isfinite().all()):
        raise IntegrityError(f"{shown} in {folder} holds values that are no numbers.")
    return tensor


def _require_plain(tensor: Tensor, shown: str, folder: Path) -> None:
    """Raise IntegrityError unless a tensor is dense and every element has memory of its own: a pickle can hold sparse
    ones, ones without data, and huge ones made of a single number."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    is_dense = is_dense and not tensor.is_nested and not tensor.is_quantized
    if not is_dense or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise IntegrityError(f"{shown} in {folder} is no plain dense tensor. Ask for the head as safetensors.")


def _shown(name: str) -> str:
    """Both names under which a tensor may stand in a file."""
    official = _file_name(name, "official")
    return f"{name!r} ({official!r} in official files)" if official != name else repr(name)


def _target_ids(tensors: Mapping[str, Tensor], settings: HeadSettings, target: TargetFacts, folder: Path) -> Tensor:
    """The target's id of each draft id: d + d2t[d]. Returns [Vd] int64."""
    Vd = settings.draft_vocab_size
    index = torch.arange(min(Vd, 2**24))
    ids = index
    if settings.is_reduced:
        offsets = tensors.get("d2t")
        if offsets is None:
            raise IntegrityError(
                f"{folder} lacks the tensor 'd2t', though its draft vocabulary ({Vd}) is not the target's "
                f"({settings.vocab_size})."
            )
        _require_plain(offsets, "'d2t'", folder)
        if tuple(offsets.shape) != (Vd,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
            raise IntegrityError(
                f"'d2t' in {folder} is {offsets.dtype} of shape {list(offsets.shape)}; whole numbers of shape [{Vd}] "
                "are needed."
            )
        ids = index + offsets.long()
    lowest, highest, limit = int(ids.min()), int(ids.max()), min(target.vocab_size, len(target.embedding))
    if lowest < 0 or highest >= limit:
        what = "'d2t'" if settings.is_reduced else "'lm_head.weight'"
        raise IntegrityError(
            f"{what} in {folder} names target ids from {lowest} to {highest}; the target's are 0 to {limit - 1}."
        )
    if len(torch.unique(ids)) < Vd:
        raise IntegrityError(f"'d2t' in {folder} names a target id twice.")
    return ids


def _embedding(tensors: Mapping[str, Tensor], settings: HeadSettings, target: TargetFacts, folder: Path) -> Tensor:
    """The checkpoint's own embedding, or the target's where it has none or the same."""
    stored = tensors.get(_EMBEDDING)
    rows = len(target.embedding)
    if stored is None:
        if settings.hidden_size != target.embedding.shape[1]:
            raise IntegrityError(
                f"{folder} lacks the tensor {_EMBEDDING!r}, and the target's embedding is {target.embedding.shape[1]} "
                f"wide where the head needs {settings.hidden_size}."
            )
        return target.embedding
    _require_plain(stored, repr(_EMBEDDING), folder)
    if stored.dim() != 2 or stored.shape[0] < rows:
        raise IntegrityError(
            f"{_EMBEDDING!r} in {folder} has shape {list(stored.shape)}; at least {rows} rows are needed, one for each "
            "of the target's tokens."
        )
    stored = _checked(tensors, _EMBEDDING, (stored.shape[0], settings.hidden_size), folder)
    own = target.embedding
    if stored.shape == own.shape and torch.equal(stored.to(own.device, own.dtype), own):
        return own
    return stored
