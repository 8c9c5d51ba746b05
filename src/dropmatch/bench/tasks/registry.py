"""The tasks by name: which fields they need, how they are worded and scored, and how long an answer may get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dropmatch.bench.tasks.code import score_completion, score_description, word_completion, word_description
from dropmatch.bench.tasks.dialogues import score_nothing
from dropmatch.bench.tasks.instructions import score_instructions
from dropmatch.bench.tasks.item import Item, Score
from dropmatch.bench.tasks.numbers import score_number
from dropmatch.bench.tasks.options import score_option, word_options

_Wording = Callable[[Mapping[str, Any]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of item. fields: those it needs beside id, task and prompt or turns, with their types;
    stop: strings that end an answer; runs_code: whether scoring starts a sandbox."""

    score: Callable[[Item, Sequence[str]], Score]
    max_new_tokens: int
    word: _Wording
    fields: Mapping[str, type | tuple[type, ...]]
    stop: tuple[str, ...] = ()
    runs_code: bool = False


def word_plainly(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The user turns as they stand."""
    return tuple(record["turns"]) if "turns" in record else (record["prompt"],)


def word_number(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A question whose answer is a number."""
    return (f"{record['prompt']}\nThink step by step, and give the answer as a number on the last line.",)


TASKS: Mapping[str, Task] = {
    "gsm8k": Task(score_number, 400, word_number, {"answer": str}),
    "humaneval": Task(score_completion, 512, word_completion, {"tests": str, "entry_point": str}, runs_code=True),
    "mbpp": Task(score_description, 400, word_description, {"tests": list, "entry_point": str}, runs_code=True),
    "mmlu": Task(score_option, 256, word_options, {"answer": str}),
    "ifeval": Task(
        score_instructions, 640, word_plainly, {"meta": dict, "meta.instruction_id_list": list, "meta.kwargs": list}
    ),
    "mt_bench": Task(score_nothing, 512, word_plainly, {}),
    "spec_bench/math_reasoning": Task(score_number, 512, word_plainly, {}),
    **{
        f"spec_bench/{part}": Task(score_nothing, 512, word_plainly, {})
        for part in ("mt_bench", "translation", "summarization", "qa", "rag")
    },
    "prompts": Task(score_nothing, 256, word_plainly, {}),
}
