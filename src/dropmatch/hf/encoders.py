"""Models that compare texts: sentence embeddings by mean pooling, and entailment between two texts.

Both are encoders as transformers loads them, from a folder or a hub id. They know nothing of decoding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropmatch.errors import ConfigError, IntegrityError, UnsupportedModelError
from dropmatch.hf.loading import load_tokenizer, resolve_model

_BATCH = 16


class SentenceEncoder:
    """Texts -> unit vectors: the mean of the last hidden states over a text's tokens.

    max_tokens: longer texts are cut there; num_cut: how many were."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_cut = 0
        self._model, self._tokenizer = model, tokenizer

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Returns [T, e] float32 on the CPU. Equal texts are encoded once."""
        unique = list(dict.fromkeys(texts))
        self.num_cut += sum(n > self.max_tokens for n in map(len, _ids(self._tokenizer, unique)))
        vectors = []
        for start in range(0, len(unique), _BATCH):
            batch = _padded(self._tokenizer, self.max_tokens, unique[start : start + _BATCH])
            batch = {name: tensor.to(self._model.device) for name, tensor in batch.items()}
            hidden = self._model(**batch).last_hidden_state.float()  # [B, S, e]
            weight = batch["attention_mask"][..., None].float()
            mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
        place = {text: i for i, text in enumerate(unique)}
        return torch.cat(vectors)[[place[text] for text in texts]]


class EntailmentModel:
    """Pairs of texts -> does the first entail the second: the likeliest label of a classifier. num_cut: pairs cut."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int) -> None:
        """Raises ConfigError if the model's labels do not name an entailment."""
        labels = {int(index): str(label) for index, label in model.config.id2label.items()}
        chosen = [index for index, label in labels.items() if label.strip().lower() == "entailment"]
        if len(chosen) != 1:
            raise ConfigError(
                f"The labels of this classifier are {', '.join(labels.values())}, and none is 'entailment'. Give a "
                "model for natural language inference whose config names its labels (id2label)."
            )
        self.max_tokens = max_tokens
        self.num_cut = 0
        self._label = chosen[0]
        self._model, self._tokenizer = model, tokenizer

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """One answer a pair. Equal pairs are asked once."""
        unique = list(dict.fromkeys(pairs))
        answers: dict[tuple[str, str], bool] = {}
        for start in range(0, len(unique), _BATCH):
            some = unique[start : start + _BATCH]
            first, second = [a for a, _ in some], [b for _, b in some]
            self.num_cut += sum(n > self.max_tokens for n in map(len, _ids(self._tokenizer, first, second)))
            batch = _padded(self._tokenizer, self.max_tokens, first, second)
            logits = self._model(**{name: tensor.to(self._model.device) for name, tensor in batch.items()}).logits
            answers.update(zip(some, (logits.argmax(-1) == self._label).tolist(), strict=True))
        return [answers[pair] for pair in pairs]


def load_encoder(name_or_path: str, *, device: str = "cpu") -> SentenceEncoder:
    """A sentence-embedding model such as all-MiniLM-L6-v2: a folder or a hub id.

    Raises ModelNotFoundError, IntegrityError, UnsupportedModelError for models that do not pool by the mean."""
    from transformers import AutoModel

    folder = resolve_model(name_or_path)
    _check_pooling(folder)
    model, tokenizer = _load(AutoModel, folder, device, optional="pooler."), load_tokenizer(folder)
    return SentenceEncoder(model, tokenizer, _max_tokens(folder, model, tokenizer))


def load_entailment(name_or_path: str, *, device: str = "cpu") -> EntailmentModel:
    """A classifier for natural language inference: a folder or a hub id. Errors as for `load_encoder`, and ConfigError
    if its labels do not name an entailment."""
    from transformers import AutoModelForSequenceClassification

    folder = resolve_model(name_or_path)
    model, tokenizer = _load(AutoModelForSequenceClassification, folder, device), load_tokenizer(folder)
    return EntailmentModel(model, tokenizer, _max_tokens(folder, model, tokenizer))


def _load(kind: Any, folder: Path, device: str, *, optional: str | None = None) -> Any:
    """optional: prefix of weights that may be missing, since nothing here reads them."""
    try:
        model, report = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers cannot load {folder} as {kind.__name__}: {error}") from error
    except (RuntimeError, OSError) as error:
        raise IntegrityError(f"The weights in {folder} cannot be read: {error}\nFetch the model again.") from error
    missing = sorted(key for key in report["missing_keys"] if optional is None or not key.startswith(optional))
    if missing:
        raise IntegrityError(
            f"{folder} lacks {len(missing)} of the tensors of {kind.__name__}, the first is {missing[0]!r}. Give a "
            "model that was trained for this."
        )
    return model.requires_grad_(False).eval().to(device)


def _check_pooling(folder: Path) -> None:
    """sentence-transformers writes how a model pools beside it."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return
    pooling = json.loads(path.read_text(encoding="utf-8"))
    modes = sorted(key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True)
    if modes != ["pooling_mode_mean_tokens"]:
        raise UnsupportedModelError(
            f"{folder} pools by {', '.join(modes) or 'nothing that is named'}, and only the mean over tokens is known. "
            "Use a model such as all-MiniLM-L6-v2."
        )


def _max_tokens(folder: Path, model: Any, tokenizer: Any) -> int:
    """Tokens of a text: what sentence-transformers' file says, else the least that tokenizer and positions allow."""
    # RoBERTa and its kin begin to count behind the padding id
    offset = 0 if model.config.model_type in ("bert", "distilbert", "albert") else 2
    limits = [int(model.config.max_position_embeddings) - offset, int(tokenizer.model_max_length)]
    path = folder / "sentence_bert_config.json"
    if path.is_file():
        limits.append(int(json.loads(path.read_text(encoding="utf-8")).get("max_seq_length") or limits[0]))
    return min(limits)


def _ids(tokenizer: Any, *texts: Sequence[str]) -> list[list[int]]:
    encoded: list[list[int]] = tokenizer(*map(list, texts), verbose=False)["input_ids"] if texts[0] else []
    return encoded


def _padded(tokenizer: Any, max_tokens: int, *texts: Sequence[str]) -> dict[str, Tensor]:
    # encoders count positions from the first token, so padding must stand behind the text
    return dict(
        tokenizer(
            *map(list, texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        )
    )
