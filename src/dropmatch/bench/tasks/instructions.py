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
_COUNT = "a whole number of at least 1"
_TEXT = "text that is not blank"
_CHARACTER = "one character"
_WORDS = "a list of texts that are not blank"
_RELATION = "'less than' or 'at least'"
_LANGUAGE = "the code of a language that the checker knows"
LANGUAGES = frozenset(
    {
        *("en", "es", "pt", "ar", "hi", "fr", "ru", "de", "ja", "it", "bn", "uk", "th", "ur", "ta"),
        *("te", "bg", "ko", "pl", "he", "fa", "vi", "ne", "sw", "kn", "mr", "gu", "pa", "ml", "fi"),
    }
)
# ids of the set's instructions with their arguments; the checkers need the extra, and files are read without it. A
# checker makes up at random what it is not given, so none may be missing.
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "keywords:existence": {"keywords": _WORDS},
    "keywords:frequency": {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION},
    "keywords:forbidden_words": {"forbidden_words": _WORDS},
    "keywords:letter_frequency": {"letter": _CHARACTER, "let_frequency": _COUNT, "let_relation": _RELATION},
    "language:response_language": {"language": _LANGUAGE},
    "length_constraints:number_sentences": {"num_sentences": _COUNT, "relation": _RELATION},
    "length_constraints:number_paragraphs": {"num_paragraphs": _COUNT},
    "length_constraints:number_words": {"num_words": _COUNT, "relation": _RELATION},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": _COUNT,
        "nth_paragraph": _COUNT,
        "first_word": _TEXT,
    },
    "detectable_content:number_placeholders": {"num_placeholders": _COUNT},
    "detectable_content:postscript": {"postscript_marker": _TEXT},
    "detectable_format:number_bullet_lists": {"num_bullets": _COUNT},
    "detectable_format:constrained_response": {},
    "detectable_format:number_highlighted_sections": {"num_highlights": _COUNT},
    "detectable_format:multiple_sections": {"section_spliter": _TEXT, "num_sections": _COUNT},
    "detectable_format:json_format": {},
    "detectable_format:title": {},
    "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": _TEXT},
    "startend:end_checker": {"end_phrase": _TEXT},
    "startend:quotation": {},
    "change_case:capital_word_frequency": {"capital_frequency": _COUNT, "capital_relation": _RELATION},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "punctuation:no_comma": {},
}


def instructions_fault(record: Mapping[str, Any]) -> str | None:
    """Each instruction must be one of the set's, and have its arguments."""
    names, arguments = record["meta"]["instruction_id_list"], record["meta"]["kwargs"]
    unknown = next((name for name in names if not isinstance(name, str) or name not in ARGUMENTS), None)
    if unknown is not None:
        near = difflib.get_close_matches(str(unknown), ARGUMENTS, n=1)
        return f"unknown instruction {unknown!r}" + (f", did you mean {near[0]!r}?" if near else "")
    if not names or len(arguments) != len(names) or not all(isinstance(one, dict) for one in arguments):
        return "'meta.kwargs' must hold one object for each entry of 'meta.instruction_id_list', and at least one"
    faults = (_arguments_fault(name, given) for name, given in zip(names, arguments, strict=True))
    return next((fault for fault in faults if fault is not None), None)


def _arguments_fault(name: str, given: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of one instruction. Those that are null count as left out."""
    wanted = ARGUMENTS[name]
    for key, kind in wanted.items():
        if not _is_of_kind(given.get(key), kind):
            return f"{key!r} of the instruction {name!r} must be {kind}, and it is {given.get(key)!r}"
    if name == "length_constraints:nth_paragraph_first_word" and given["nth_paragraph"] > given["num_paragraphs"]:
        return f"'nth_paragraph' of {name!r} is {given['nth_paragraph']}, of {given['num_paragraphs']} paragraphs"
    foreign = next((key for key, value in given.items() if key not in wanted and value), None)
    return None if foreign is None else f"the instruction {name!r} has no argument {foreign!r}"


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind == _COUNT:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if kind == _WORDS:
        return isinstance(value, list) and bool(value) and all(_is_of_kind(one, _TEXT) for one in value)
    if not isinstance(value, str) or not value.strip():
        return False
    if kind == _RELATION:
        return value in ("less than", "at least")
    if kind == _LANGUAGE:
        return value in LANGUAGES
    return kind == _TEXT or len(value) == 1


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
