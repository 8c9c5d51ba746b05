"""Functions written by the model (HumanEval, MBPP), run against the data set's own tests in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.bench.sandbox import Limits, Outcome, run_code
from dropmatch.bench.tasks.item import Item, Score, one_answer

LIMITS = Limits()


def word_completion(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A function to be completed (HumanEval)."""
    return (
        "Complete this Python function. Answer with the whole function in a code block.\n\n"
        f"```python\n{record['prompt']}```",
    )


def word_description(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A function to be written so that given asserts hold (MBPP)."""
    tests = "\n".join(record["tests"])
    return (
        f"{record['prompt']}\nThe code should pass these tests:\n\n```python\n{tests}\n```\n\n"
        "Answer with the Python code in a code block, without the tests.",
    )


def extract_code(answer: str, entry_point: str) -> str:
    """The code block that defines entry_point, else the first code block, else the whole answer.

    A block that the answer leaves open (it was cut short) goes to the end.
    """
    blocks = code_blocks(answer)
    if not blocks:
        return answer
    return next((block for block in blocks if defines(block, entry_point)), blocks[0])


def code_blocks(answer: str) -> list[str]:
    """What stands between fences of three backticks, without the fences' indentation."""
    blocks: list[str] = []
    lines: list[str] | None = None
    indent = 0
    for line in answer.split("\n"):
        if line.lstrip().startswith("```"):
            if lines is None:
                lines, indent = [], len(line) - len(line.lstrip())
            else:
                blocks.append("".join(lines))
                lines = None
        elif lines is not None:
            lines.append((line[indent:] if not line[:indent].strip() else line) + "\n")
    rest = "".join(lines or [])
    return [*blocks, rest] if rest.strip() else blocks


def defines(code: str, name: str) -> bool:
    """Whether code has a function, a class or a variable of this name at its top level."""
    return re.search(rf"^(?:(?:async\s+)?def\s+|class\s+)?{re.escape(name)}\s*[(:=\[]", code, re.MULTILINE) is not None


def completed_program(prompt: str, code: str, entry_point: str) -> str:
    """The prompt up to its unfinished function and then the whole one, or the prompt and the body that it lacks."""
    if not defines(code, entry_point):
        return prompt + code
    unfinished = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return f"{prompt[: unfinished.start()] if unfinished else prompt}\n{code}"


def entry_point_fault(record: Mapping[str, Any]) -> str | None:
    """No code defines a function without a name."""
    name = record["entry_point"]
    return None if name.isidentifier() else f"the field 'entry_point' must name a function, and it is {name!r}"


def completion_fault(record: Mapping[str, Any]) -> str | None:
    """HumanEval: tests without check can only fail."""
    if not defines(record["tests"], "check"):
        return "the field 'tests' does not define check"
    return entry_point_fault(record)


def description_fault(record: Mapping[str, Any]) -> str | None:
    """MBPP: without tests any code would pass."""
    tests, meta = record["tests"], record.get("meta", {})
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        return "the field 'tests' must be a list of at least one assert, each a string that is not blank"
    if not isinstance(meta, dict) or not isinstance(meta.get("test_setup_code", ""), str):
        return "the field 'meta' is not an object, or its 'test_setup_code' is not a string"
    return entry_point_fault(record)


def score_completion(item: Item, answers: Sequence[str]) -> Score:
    """HumanEval: correct if the data set's check(entry_point) runs through."""
    record = item.record
    code = extract_code(one_answer(item, answers), record["entry_point"])
    program = completed_program(record["prompt"], code, record["entry_point"])
    return _code_score(
        run_code(program, checks=f"{record['tests']}\ncheck({record['entry_point']})", limits=LIMITS), code
    )


def score_description(item: Item, answers: Sequence[str]) -> Score:
    """MBPP: correct if all asserts hold."""
    record = item.record
    code = extract_code(one_answer(item, answers), record["entry_point"])
    checks = "\n".join([record.get("meta", {}).get("test_setup_code", ""), *record["tests"]])
    return _code_score(run_code(code, checks=checks, limits=LIMITS), code)


def _code_score(outcome: Outcome, code: str) -> Score:
    return Score(outcome.passed, {"timeout": float(outcome.status == "timeout")}, code)
