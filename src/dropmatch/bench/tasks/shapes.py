"""Records as public sets publish them, brought into the one schema that load.py checks.

A record is known by its fields: question.jsonl of FastChat (MT-bench, KoMT-bench, Spec-Bench and sets in their form),
LiveCodeBench's code_generation_lite, HumanEval, HumanEval+, MBPP, GSM8K, IFEval and lists of instructions (Alpaca).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

_Record = Mapping[str, Any]

_SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}
_SPLITS = {"gsm8k_train": "gsm8k"}  # a split under a name of its own, and the task that words and scores it
_HANGUL = re.compile(r"[\uac00-\ud7a3]")


def to_schema(record: _Record, number: int, task: str | None = None) -> dict[str, Any] | None:
    """The record in the schema, or None if its fields fit no known shape. number: names records without an id;
    task: what questions in FastChat's form belong to, where their category does not tell."""
    if "id" in record and "task" in record:
        is_named = isinstance(record["task"], str)
        return {**record, "task": _SPLITS.get(record["task"], record["task"])} if is_named else dict(record)
    for fields, convert in _SHAPES:
        if fields <= record.keys():
            return convert(record, number, task)
    return None


def _meta(record: _Record, *names: str) -> dict[str, Any]:
    return {name: record[name] for name in names if name in record}


def _questions(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    """FastChat. Korean turns are KoMT-bench's, and Spec-Bench's own categories its; all else is MT-bench's."""
    category = record.get("category")
    turns = record["turns"]
    if task is None and category in _SPEC_BENCH:
        task = "spec_bench"
    if task is None:
        is_korean = isinstance(turns, list) and any(isinstance(turn, str) and _HANGUL.search(turn) for turn in turns)
        task = "komt_bench" if is_korean else "mt_bench"
    name = task
    if task == "spec_bench":
        name = f"spec_bench/{category if category in _SPEC_BENCH else 'mt_bench'}"
    converted = {"id": f"{task}/{record['question_id']}", "task": name, "turns": turns}
    reference = record.get("reference")
    if name == "spec_bench/math_reasoning" and isinstance(reference, list) and reference:
        converted["answer"] = str(reference[0]).rpartition("#### ")[2].replace(",", "").strip()
    return converted | {"meta": _meta(record, "question_id", "category", "reference")}


def _live_code(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    return {
        "id": f"livecodebench/{record['question_id']}",
        "task": "livecodebench",
        "prompt": record["question_content"],
        **_meta(record, "starter_code", "public_test_cases", "private_test_cases", "metadata"),
        "meta": _meta(record, "question_title", "platform", "contest_id", "contest_date", "difficulty"),
    }


def _human_eval_plus(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    return {
        "id": record["task_id"],
        "task": "humaneval_plus",
        "answer": record["canonical_solution"],
        **_meta(record, "prompt", "entry_point", "base_input", "plus_input", "atol"),
        "meta": _meta(record, "task_id", "contract"),
    }


def _human_eval(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    return {
        "id": record["task_id"],
        "task": "humaneval",
        "tests": record["test"],
        "answer": record.get("canonical_solution", ""),
        **_meta(record, "prompt", "entry_point"),
        "meta": _meta(record, "task_id"),
    }


def _mbpp(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    return {
        "id": f"mbpp/{record['task_id']}",
        "task": "mbpp",
        "prompt": record.get("text", record.get("prompt")),
        "answer": record["code"],
        "entry_point": _tested_function(record["code"], record["test_list"]),
        "tests": record["test_list"],
        "meta": {"task_id": record["task_id"], "test_setup_code": record.get("test_setup_code", "")},
    }


def _tested_function(code: str, tests: list[str]) -> str | None:
    """The function of the code that the tests name, as MBPP does not say."""
    try:
        defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return None
    return next((name for name in reversed(defined) if re.search(rf"\b{name}\(", tests[0])), None)


def _gsm8k(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    solution = str(record["answer"])
    return {
        "id": f"gsm8k/{number:04d}",
        "task": "gsm8k",
        "prompt": record["question"],
        "answer": solution.rpartition("#### ")[2].replace(",", "").strip(),
        "meta": {"solution": solution},
    }


def _ifeval(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    return {
        "id": f"ifeval/{record['key']}",
        "task": "ifeval",
        "prompt": record["prompt"],
        "meta": _meta(record, "key", "instruction_id_list", "kwargs"),
    }


def _instructions(record: _Record, number: int, task: str | None) -> dict[str, Any]:
    prompt, context = record["instruction"], record.get("input") or ""
    if isinstance(prompt, str) and isinstance(context, str) and context.strip():
        prompt = f"{prompt}\n\n{context}"
    meta = {"reference": record["output"]} if "output" in record else {}
    return {"id": f"alpaca/{number:04d}", "task": "alpaca", "prompt": prompt, "meta": meta}


# the fields that tell a shape, the narrower shape first
_SHAPES: tuple[tuple[set[str], Callable[[_Record, int, str | None], dict[str, Any]]], ...] = (
    ({"question_id", "question_content"}, _live_code),
    ({"question_id", "turns"}, _questions),
    ({"task_id", "base_input", "canonical_solution"}, _human_eval_plus),
    ({"task_id", "test", "entry_point"}, _human_eval),
    ({"task_id", "code", "test_list"}, _mbpp),
    ({"key", "prompt", "instruction_id_list"}, _ifeval),
    ({"instruction"}, _instructions),
    ({"question", "answer"}, _gsm8k),
)
