"""LiveCodeBench: contest problems, solved by a script on standard input or by a method, with hidden tests.

Rows are those of code_generation_lite. Its hidden tests are a pickle, which is read without the means to name any
class or function, so that reading one runs no code.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from dropmatch.bench.sandbox import Limits, run_calls, run_code
from dropmatch.bench.tasks.item import Item, Score, one_answer
from dropmatch.errors import DataError

_LIMITS = Limits(cpu_seconds=6, wall_seconds=24.0, memory_bytes=4 << 30, output_bytes=16 << 20)
_MAX_TESTS_BYTES = 1 << 30  # of one problem's hidden tests, unpacked
_UNREADABLE = (  # what broken JSON, base64, zlib and pickles raise
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, RecursionError),
    *(zlib.error, binascii.Error, pickle.UnpicklingError),
)
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
# contest solutions count on names that their site imports for them
_PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in _MODULES),
        "from builtins import *",
        f"import {', '.join(_MODULES)}",
        "sys.setrecursionlimit(50000)",
        "",
    ]
)


def word_problem(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The problem, and whether it is solved by a given method or by a script."""
    if starter := record.get("starter_code"):
        how = f"Complete this code, and keep its names:\n\n```python\n{starter}\n```"
    else:
        how = "Write a Python program that reads the input from standard input and prints the output."
    return (f"{record['prompt']}\n\n{how}\n\nAnswer with the whole program in one Python code block.",)


def extract_program(answer: str) -> str:
    """What stands between the last two lines with a fence, or "" with fewer than two."""
    lines = answer.split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


def problem_fault(record: Mapping[str, Any]) -> str | None:
    """Tests that cannot be read or asked, which would show after hours of decoding."""
    try:
        tests, name = read_tests(record), _method(record)
        for test in tests if name else []:
            _arguments(test)
    except DataError as error:
        return str(error).removesuffix(".")
    return None


def score_problem(item: Item, answers: Sequence[str]) -> Score:
    """correct if all public and hidden tests pass, each within 6 s of CPU time. Stops at the first that fails."""
    code = extract_program(one_answer(item, answers))
    tests, name = read_tests(item.record), _method(item.record)
    passed = 0
    for test in tests if code else []:
        if not (_is_right_call(code, name, test) if name else _is_right_script(code, test)):
            break
        passed += 1
    return Score(passed == len(tests), {"tests_passed": passed / len(tests)}, code or None)


def _is_right_script(code: str, test: Mapping[str, str]) -> bool:
    outcome = run_code(_PRELUDE + code, stdin=test["input"], is_main=True, limits=_LIMITS)
    return outcome.status in ("finished", "exited") and same_output(outcome.stdout, test["output"])


def _is_right_call(code: str, name: str, test: Mapping[str, str]) -> bool:
    arguments, want = _arguments(test)
    entry_point = f"Solution.{name}" if "class Solution" in code else name
    calls = run_calls(_PRELUDE + code, entry_point, [arguments], limits=_LIMITS).calls
    if not calls or calls[0].error is not None:
        return False
    value = list(calls[0].value) if isinstance(calls[0].value, tuple) else calls[0].value
    return bool(value == want)


def _arguments(test: Mapping[str, str]) -> tuple[list[Any], Any]:
    """Of a test of a method: its arguments, one a line, and what it should return."""
    try:
        return [json.loads(line) for line in test["input"].split("\n")], json.loads(test["output"])
    except (ValueError, RecursionError) as error:
        raise DataError(f"a test of a method holds no JSON ({error}).") from error


def same_output(got: str, want: str) -> bool:
    """Equal line by line without outer blanks, or equal as decimal numbers."""
    got_lines, want_lines = ([line.strip() for line in text.strip().split("\n")] for text in (got, want))
    return len(got_lines) == len(want_lines) and all(map(_same_line, got_lines, want_lines))


def _same_line(got: str, want: str) -> bool:
    if got == want:
        return True
    try:
        return [Decimal(word) for word in got.split()] == [Decimal(word) for word in want.split()]
    except InvalidOperation:
        return False


def read_tests(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Public tests, then hidden ones: input, output and testtype. Raises DataError if they cannot be read."""
    try:
        public = json.loads(record["public_test_cases"])
        private = _unpacked(record.get("private_test_cases") or "[]")
        tests = [*public, *private]
        if not tests or not all(isinstance(one["input"] + one["output"], str) for one in tests):
            raise ValueError("no tests, or tests that are no text")
    except _UNREADABLE as error:
        raise DataError(f"the test cases cannot be read ({type(error).__name__}: {error}).") from error
    return tests


def _unpacked(text: str) -> Any:
    """Hidden tests: JSON as it stands, or base64 of zlib of a pickled JSON string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_TESTS_BYTES)
        if not unpacker.eof:
            raise ValueError("the hidden tests are cut short or too large") from None
        return json.loads(_PlainUnpickler(io.BytesIO(data)).load())


class _PlainUnpickler(pickle.Unpickler):
    """Reads strings, numbers and containers; nothing that a pickle could call."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, and only plain values are read")


def _method(record: Mapping[str, Any]) -> str | None:
    """The method that the tests call, or None for a script."""
    metadata = record.get("metadata") or {}
    try:
        found = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"the field 'metadata' is no JSON object ({error}).") from error
    if found is not None and not str(found).isidentifier():
        raise DataError(f"func_name {found!r} is no name of a method.")
    return found
