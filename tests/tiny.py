"""A tiny pair on disk: Llama target and Qwen2 drafter in float32 that share a real byte-level BPE tokenizer.

Built from configs with a seed. The weights are large, so that logits differ and greedy decoding does not hang on one
token; the drafter of `agreeing` is the target with a little noise, so that drafts are partly kept.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LINES = (
    "the harbour was quiet when the last boat came in and the men carried the nets ashore",
    "def area(width, height): return width * height",
    "the sky is blue because air scatters short waves more strongly than long ones",
    "a train travels sixty kilometres in forty five minutes, so how fast is the train",
)
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>"]
PAD, EOS = 0, 1


def tokenizer(*, chat: bool = True, lines: tuple[str, ...] = LINES) -> Any:
    """A byte-level BPE of about 320 tokens; pad is 0 and the end of sequence 1. chat: with a template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        padding_side="left",
        chat_template=TEMPLATE if chat else None,
        clean_up_tokenization_spaces=False,
    )


def target(*, seed: int = 0, vocab_size: int = 320, hidden_size: int = 32, scale: float = 0.3) -> Any:
    """A Llama of two layers in float32."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=scale,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def stranger(*, seed: int = 1, vocab_size: int = 320) -> Any:
    """A Qwen2 drafter that agrees with nobody."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def agreeing(model: Any, *, noise: float = 0.02, seed: int = 2) -> Any:
    """A copy of a model with noisy weights: a drafter that is often, but not always, right."""
    drafter = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return drafter


@dataclass(frozen=True, slots=True)
class TinyPair:
    """Folders of a saved pair."""

    target: Path
    draft: Path


def save(folder: Path, model: Any, **options: Any) -> str:
    """Model and tokenizer in a folder, whose name is returned. options: of `tokenizer`."""
    model.save_pretrained(folder)
    tokenizer(**options).save_pretrained(folder)
    return str(folder)


def save_pair(folder: Path, **options: Any) -> TinyPair:
    """Target and agreeing drafter with tokenizers, each in a folder of its own. options: of `tokenizer`."""
    model = target()
    pair = TinyPair(folder / "target", folder / "draft")
    save(pair.target, model, **options)
    save(pair.draft, agreeing(model), **options)
    return pair
