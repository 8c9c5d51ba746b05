"""From a name to a loaded model: folders, GGUF files, names of pair members, hub ids; and the check that draft and
target read the same tokens. What a loaded model can do is for hf/support.py to say.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dropmatch.errors import (
    ConfigError,
    IntegrityError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnknownNameError,
    UnsupportedModelError,
)
from dropmatch.hf.gguf import ensure_converted
from dropmatch.hf.hub import hub_snapshot
from dropmatch.hf.packages import PACKAGED_MODELS
from dropmatch.hf.pairs import ensure_model, hub_or_packages

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
# Digits, case, accents composed and not, runs of blanks, other scripts: where tokenizers of one vocabulary differ.
_PROBES = (
    "The 3 quick brown foxes didn't pay 1,234.50 euros on 12/31/1999.",
    "def f(x):\n\treturn  x**2  # DON'T\n\n\n",
    "caf\u00e9 cafe\u0301 \u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f642",
)


def resolve_model(name_or_path: str | Path) -> Path:
    """Folder of a model in the transformers format, fetched or converted if need be.

    name_or_path: a folder, a .gguf file, the name of a packaged model, or a hub id.
    Raises ModelNotFoundError saying what was tried and what to do.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if path.is_file():
        return ensure_converted(path)
    if path.is_dir():
        return _model_folder(path)
    if name in PACKAGED_MODELS:
        return ensure_model(PACKAGED_MODELS[name])
    if path.suffix == ".gguf":
        raise ModelNotFoundError(f"There is no file {name!r}.{_advice(name)}")
    for model in PACKAGED_MODELS.values():
        if name.lower() == model.hub_id.lower():
            return hub_or_packages(model)
    try:
        return hub_snapshot(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"There is no folder {name!r}. {error}{_advice(name)}") from error


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: str = "auto",
    device_map: str | Mapping[str, int | str] | None = None,
) -> Any:
    """A PreTrainedModel ready to decode: evaluation mode, no gradients, sdpa attention where the model has it.

    dtype: "auto" takes the checkpoint's. device: "auto" takes CUDA if there is one. device_map: places parts on several
    devices (needs accelerate) and leaves device at "auto".
    Raises ModelNotFoundError, IntegrityError for damaged files, UnsupportedModelError for encoders.
    """
    if device_map is not None and device != "auto":
        raise ConfigError(f"device={device!r} and device_map={device_map!r} exclude each other. Give one of them.")
    chosen_dtype, chosen_device = _dtype(dtype), _device(device)
    folder = resolve_model(name_or_path)
    _check_config(folder)
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=chosen_dtype, device_map=device_map, output_loading_info=True, trust_remote_code=False
        )
    except (SafetensorError, RuntimeError, OSError) as error:
        raise IntegrityError(f"The weights in {folder} cannot be read: {error}\nFetch the model again.") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers cannot load {folder} as a causal language model: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    if missing := sorted(report["missing_keys"]):
        raise IntegrityError(
            f"{folder} lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}. Fetch the model again."
        )
    model.requires_grad_(False)
    return model.eval() if device_map is not None else model.eval().to(chosen_device)


def load_tokenizer(name_or_path: str | Path) -> Any:
    """The model's tokenizer. Raises ModelNotFoundError without one, IntegrityError if its files are damaged."""
    folder = resolve_model(name_or_path)
    _read_config(folder)
    from transformers import AutoTokenizer

    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
    if not any((folder / file).exists() for file in known):
        raise ModelNotFoundError(f"{folder} holds no tokenizer (none of {', '.join(known)}).")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise IntegrityError(f"The tokenizer in {folder} cannot be read: {error}\nFetch the model again.") from error


def check_tokenizers(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise TokenizerMismatchError unless both read and write the same ids; the message names the first difference.

    The models' own vocabulary sizes may differ: some are padded.
    """
    difference = (
        _id_difference("id", target_tokenizer.get_vocab(), draft_tokenizer.get_vocab())
        or _id_difference("special id", target_tokenizer.get_added_vocab(), draft_tokenizer.get_added_vocab())
        or _encoding_difference(target_tokenizer, draft_tokenizer)
    )
    if difference:
        raise TokenizerMismatchError(
            f"Draft and target do not share a tokenizer: {difference}.\n"
            "Choose a draft model of the target's family, or the n-gram drafter, which needs none."
        )


def _id_difference(what: str, target: Mapping[str, int], draft: Mapping[str, int]) -> str | None:
    """The lowest id that stands for different tokens, in words. None if there is none."""
    if target == draft:
        return None
    target_tokens = {i: token for token, i in target.items()}
    draft_tokens = {i: token for token, i in draft.items()}
    all_ids = target_tokens.keys() | draft_tokens.keys()
    differing = [i for i in all_ids if target_tokens.get(i) != draft_tokens.get(i)]
    if not differing:
        return None
    first = min(differing)
    ours, theirs = _token(target_tokens, first), _token(draft_tokens, first)
    return f"{what} {first} is {ours} for the target and {theirs} for the draft"


def _token(tokens: Mapping[int, str], index: int) -> str:
    return repr(tokens[index]) if index in tokens else "no token"


def _encoding_difference(target: Any, draft: Any) -> str | None:
    for text in _PROBES:
        target_ids, draft_ids = target(text)["input_ids"], draft(text)["input_ids"]
        if target_ids != draft_ids:
            return f"{text!r} is {target_ids} for the target and {draft_ids} for the draft"
    return None


def _model_folder(path: Path) -> Path:
    """The folder itself, or the conversion of the only GGUF in it."""
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ensure_converted(files[0])
    if files:
        raise ModelNotFoundError(f"{path} holds {len(files)} .gguf files. Name the one you mean, such as {files[0]}.")
    raise ModelNotFoundError(f"{path} is no model folder: it has neither a config.json nor a .gguf file.")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise IntegrityError(f"{folder / 'config.json'} is damaged: {error}. Fetch the model again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise IntegrityError(f"{folder / 'config.json'} names no model_type, so it is no transformers model.")
    return config


def _check_config(folder: Path) -> None:
    """Refuse what AutoModelForCausalLM would load wrongly: it gives a BERT a causal head that was never trained."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    config = _read_config(folder)
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{folder} is an encoder-decoder model ({kind}). Use a decoder-only language model."
        )
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder")
    if is_encoder or (kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "auto_map" not in config):
        what = "an encoder-only model" if is_encoder else "not a causal language model that transformers knows"
        raise UnsupportedModelError(f"{folder} is {what} ({kind}). Use a decoder-only language model.")


def _dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in _DTYPES:
        raise UnknownNameError("dtype", dtype, ["auto", *_DTYPES])
    return _DTYPES[dtype]


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{device!r} is no device. Use 'auto', 'cpu', 'cuda' or 'cuda:1'.") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"There is no device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices.")
    return chosen


def _advice(name: str) -> str:
    near = difflib.get_close_matches(name, PACKAGED_MODELS, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint}\nGive a model folder, a .gguf file, a hub id, or one of {', '.join(sorted(PACKAGED_MODELS))}."


def hide_progress_bars() -> None:
    """Keep transformers' own progress bars off the terminal, for this process."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
