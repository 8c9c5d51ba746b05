"""IFEval: instructions that a program can check. The checkers are those of lm-evaluation-harness."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dropmatch.bench.tasks.item import Item, Score, one_answer
from dropmatch.errors import ConfigError

_NEEDED = ("lm_eval", "langdetect", "immutabledict", "nltk")
_SENTENCES = "tokenizers/punkt_tab"
# ids of the set's instructions; the checkers need the extra, and files are read without it
KINDS = frozenset(
    f"{group}:{name}"
    for group, names in {
        "keywords": ("existence", "frequency", "forbidden_words", "letter_frequency"),
        "language": ("response_language",),
        "length_constraints": (
            "number_sentences",
            "number_paragraphs",
            "number_words",
            "nth_paragraph_first_word",
        ),
        "detectable_content": ("number_placeholders", "postscript"),
        "detectable_format": (
            "number_bullet_lists",
            "constrained_response",
            "number_highlighted_sections",
            "multiple_sections",
            "json_format",
            "title",
        ),
        "combination": ("two_responses", "repeat_prompt"),
        "startend": ("end_checker", "quotation"),
        "change_case": ("capital_word_frequency", "english_capital", "english_lowercase"),
        "punctuation": ("no_comma",),
    }.items()
    for name in names
)


def instructions_fault(record: Mapping[str, Any]) -> str | None:
    """Each instruction must be one of the set's, and have its arguments."""
    names, arguments = record["meta"]["instruction_id_list"], record["meta"]["kwargs"]
    unknown = next((name for name in names if name not in KINDS), None)
    if unknown is not None:
        near = difflib.get_close_matches(str(unknown), KINDS, n=1)
        return f"unknown instruction {unknown!r}" + (f", did you mean {near[0]!r}?" if near else "")
    if not names or len(arguments) != len(names) or not all(isinstance(one, dict) for one in arguments):
        return "'meta.kwargs' must hold one object for each entry of 'meta.instruction_id_list', and at least one"
    return None


def score_instructions(item: Item, answers: Sequence[str]) -> Score:
    """correct if all instructions are followed (prompt-level strict).

    metrics: prompt_level_strict and _loose; followed_strict and _loose count instructions, out of `instructions`.
    Raises ConfigError naming the extra where lm-evaluation-harness is missing.
    """
    checkers = _checkers()
    meta, answer = item.record["meta"], one_answer(item, answers)
    example = checkers.InputExample(
        key=meta.get("key", 0),
        instruction_id_list=list(meta["instruction_id_list"]),
        prompt=item.record["prompt"],
        kwargs=[dict(kwargs) for kwargs in meta["kwargs"]],
    )
    strict = checkers.test_instruction_following_strict(example, answer)
    loose = checkers.test_instruction_following_loose(example, answer)
    is_followed = bool(strict.follow_all_instructions)
    return Score(
        is_followed,
        {
            "prompt_level_strict": float(is_followed),
            "prompt_level_loose": float(loose.follow_all_instructions),
            "followed_strict": float(sum(strict.follow_instruction_list)),
            "followed_loose": float(sum(loose.follow_instruction_list)),
            "instructions": float(len(strict.follow_instruction_list)),
        },
    )


@cache
def _checkers() -> ModuleType:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"IFEval is scored by lm-evaluation-harness, and {', '.join(missing)} cannot be imported. "
            "Install them with `pip install dropmatch[eval]`."
        )
    _find_sentence_data()
    from langdetect import DetectorFactory
    from lm_eval.tasks.ifeval import utils

    DetectorFactory.seed = 0  # language detection draws at random otherwise
    return utils  # type: ignore[no-any-return]


def _find_sentence_data() -> None:
    """Let NLTK find its sentence splitter: where it looks anyway, else inside the llama-index-core package."""
    import nltk

    try:
        nltk.data.find(_SENTENCES)
        return
    except LookupError:
        pass
    try:
        package = importlib.metadata.distribution("llama-index-core")
    except importlib.metadata.PackageNotFoundError:
        package = None
    folder = None if package is None else Path(str(package.locate_file("llama_index/core/_static/nltk_cache")))
    if folder is None or not (folder / _SENTENCES).is_dir():
        raise ConfigError(
            "IFEval counts sentences with NLTK's punkt_tab data, which is not there. Run "
            "`python -m nltk.downloader punkt_tab`, or `pip install --no-deps llama-index-core`, which carries it."
        )
    nltk.data.path.append(str(folder))
