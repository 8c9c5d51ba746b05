"""The tasks by name: which fields they need, how they are worded and scored, and how long an answer may get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dropmatch.bench.tasks.code import (
    completion_fault,
    description_fault,
    score_completion,
    score_description,
    word_completion,
    word_description,
)
from dropmatch.bench.tasks.dialogues import score_nothing
from dropmatch.bench.tasks.instructions import instructions_fault, score_instructions
from dropmatch.bench.tasks.item import Item, Score
from dropmatch.bench.tasks.livecodebench import problem_fault, score_problem, word_problem
from dropmatch.bench.tasks.numbers import number_fault, score_number
from dropmatch.bench.tasks.options import option_fault, score_option, word_options
from dropmatch.bench.tasks.plus import plus_fault, score_plus

_Wording = Callable[[Mapping[str, Any]], tuple[str, ...]]
Kind = type[str] | type[list[Any]] | type[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of item. fields: those it needs beside id, task and prompt or turns, with their types;
    stop: strings that end an answer; runs_code: whether scoring starts a sandbox; fault: why a record that has
    all fields cannot be scored, as part of a sentence, or None."""

    score: Callable[[Item, Sequence[str]], Score]
    max_new_tokens: int
    word: _Wording
    fields: Mapping[str, Kind]
    stop: tuple[str, ...] = ()
    runs_code: bool = False
    fault: Callable[[Mapping[str, Any]], str | None] = lambda record: None


def word_plainly(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The user turns as they stand."""
    return tuple(record["turns"]) if "turns" in record else (record["prompt"],)


def word_number(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A question whose answer is a number."""
    return (f"{record['prompt']}\nThink step by step, and give the answer as a number on the last line.",)


TASKS: Mapping[str, Task] = {
    "gsm8k": Task(score_number, 400, word_number, {"prompt": str, "answer": str}, fault=number_fault),
    "humaneval": Task(
        score_completion,
        512,
        word_completion,
        {"prompt": str, "tests": str, "entry_point": str},
        runs_code=True,
        fault=completion_fault,
    ),
    "mbpp": Task(
        score_description,
        400,
        word_description,
        {"prompt": str, "tests": list, "entry_point": str},
        runs_code=True,
        fault=description_fault,
    ),
    "mmlu": Task(score_option, 256, word_options, {"prompt": str, "answer": str}, fault=option_fault),
    "ifeval": Task(
        score_instructions,
        640,
        word_plainly,
        {"prompt": str, "meta": dict, "meta.instruction_id_list": list, "meta.kwargs": list},
        fault=instructions_fault,
    ),
    "humaneval_plus": Task(
        score_plus,
        768,
        word_completion,
        {"prompt": str, "answer": str, "entry_point": str, "base_input": list, "plus_input": list},
        runs_code=True,
        fault=plus_fault,
    ),
    "livecodebench": Task(
        score_problem,
        2048,
        word_problem,
        {"prompt": str, "public_test_cases": str},
        runs_code=True,
        fault=problem_fault,
    ),
    "komt_bench": Task(score_nothing, 1024, word_plainly, {}),
    "alpaca": Task(score_nothing, 512, word_plainly, {}),
    "mt_bench": Task(score_nothing, 512, word_plainly, {}),
    "spec_bench/math_reasoning": Task(score_number, 512, word_plainly, {}, fault=number_fault),
    **{
        f"spec_bench/{part}": Task(score_nothing, 512, word_plainly, {})
        for part in ("mt_bench", "translation", "summarization", "qa", "rag")
    },
    "prompts": Task(score_nothing, 256, word_plainly, {}),
}
