"""Items from files of every shape, their wording, and scores of right and wrong answers."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import pickle
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from dropmatch.bench.tasks import Item, load_items, pooled_metrics, score, score_all
from dropmatch.bench.tasks import instructions as ifeval
from dropmatch.bench.tasks.code import code_blocks, extract_code
from dropmatch.bench.tasks.livecodebench import extract_program, read_tests, same_output
from dropmatch.bench.tasks.numbers import flexible_number, strict_number
from dropmatch.bench.tasks.options import extract_letter
from dropmatch.bench.tasks.plus import is_same
from dropmatch.bench.tasks.registry import TASKS
from dropmatch.errors import ConfigError, DataError, UnknownNameError

Write = Callable[..., Path]

GSM8K = {"id": "gsm8k/0", "task": "gsm8k", "prompt": "How many?", "answer": "18"}
HUMANEVAL = {
    "id": "HumanEval/0",
    "task": "humaneval",
    "prompt": 'import math\n\n\ndef double(x):\n    """Twice x."""\n',
    "answer": "    return 2 * x\n",
    "tests": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}
MBPP = {
    "id": "mbpp/1",
    "task": "mbpp",
    "prompt": "Write a function that doubles.",
    "answer": "def double(x):\n    return 2 * x",
    "tests": ["assert double(2) == 4", "assert double(ZERO) == 0"],
    "entry_point": "double",
    "meta": {"test_setup_code": "ZERO = 0"},
}
MMLU = {"id": "mmlu/0", "task": "mmlu", "prompt": "About.\n\nWhich?\nA. x\nB. y\nC. z\nD. w\nAnswer:", "answer": "B"}
IFEVAL = {
    "id": "ifeval/1",
    "task": "ifeval",
    "prompt": "Use no commas.",
    "meta": {"key": 1, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}
TWO_TURNS = {"id": "mt_bench/81", "task": "mt_bench", "turns": ["Write.", "Rewrite."]}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes records as JSON lines."""

    def write_lines(*records: object, name: str = "set.jsonl") -> Path:
        path = tmp_path / name
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_lines


@pytest.fixture
def one(write: Write) -> Callable[..., Item]:
    """The item of one record."""
    return lambda record, **options: load_items(write(record), **options)[0]


# --- loading ---


def test_items_come_in_order_from_any_place(write: Write) -> None:
    path = write(*({**GSM8K, "id": str(i)} for i in range(6)))
    assert [item.id for item in load_items(path)] == list("012345")
    assert [item.id for item in load_items(str(path), 2)] == ["0", "1"]
    assert [item.id for item in load_items(path, 2, start=3)] == ["3", "4"]
    assert [item.id for item in load_items(path, start=4)] == ["4", "5"]
    assert load_items(path, 0) == []
    assert load_items(path.parent / "missing", 0) == []


def test_blank_lines_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("\n" + json.dumps({**GSM8K, "more": 1}) + "\n\n")
    assert load_items(path)[0].record["more"] == 1


def test_lines_after_those_asked_for_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(GSM8K) + "\n{oops\n")
    assert len(load_items(path, 1)) == 1


@pytest.mark.parametrize("name", ["set.jsonl.gz", "set.json", "set.parquet"])
def test_compressed_lines_lists_and_tables_are_read(name: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".gz"):
        write(GSM8K, name=name)
    elif name.endswith(".json"):
        path.write_text(json.dumps([GSM8K]))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow (extra eval)")
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist([GSM8K]), path)
    assert load_items(path) == load_items(write(GSM8K))


FILE_ERRORS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.jsonl", b"", "a.jsonl has no items"),
    "blank": ("a.jsonl", b"\n\n", "a.jsonl has no items"),
    "not JSON": ("a.jsonl", b'{"id": 1}x\n', "a.jsonl, line 1: not JSON"),
    "not JSON later": ("a.jsonl", json.dumps(GSM8K).encode() + b"\n\n{oops\n", "a.jsonl, line 3: not JSON"),
    "not UTF-8": ("a.jsonl", b'{"id": "caf\xe9"}\n', "a.jsonl, line 1: not UTF-8"),
    "no object": ("a.jsonl", b"[1]\n", "a.jsonl, line 1: the field 'id' is missing"),
    "no list": ("a.json", b'{"id": "x"}', "a.json: not a JSON list"),
    "bad list": ("a.json", json.dumps([GSM8K, 3]).encode(), "a.json, entry 2: the field 'id' is missing"),
    "not JSON whole": ("a.json", b"[", "a.json: not JSON"),
    "no gzip": ("a.jsonl.gz", b"plain", "a.jsonl.gz: not a whole gzip file"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(json.dumps(GSM8K).encode())[:-12], "a.jsonl.gz: not a whole gzip file"),
    "deep": ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl, line 1: nested too deep"),
    "UTF-16": ("a.jsonl", json.dumps(GSM8K).encode("utf-16"), "line 1: not UTF-8 text but UTF-16; save it as UTF-8"),
    "half a character": (
        "a.jsonl",
        json.dumps(GSM8K).encode() + b"\n" + json.dumps({**GSM8K, "id": "2", "prompt": "a \ud83d"}).encode(),
        "a.jsonl, line 2: the text holds '\\ud83d', half of a character",
    ),
    "a BOM": ("a.jsonl", b"\xef\xbb\xbf" + json.dumps(GSM8K).encode(), "byte-order mark; save it as UTF-8 without one"),
}


@pytest.mark.parametrize("case", FILE_ERRORS)
def test_files_that_cannot_be_read_are_named_with_the_line(case: str, tmp_path: Path) -> None:
    name, content, message = FILE_ERRORS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        load_items(tmp_path / name)
    assert message in str(error.value)


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def _ifeval(names: list[str], arguments: list[Any]) -> dict[str, Any]:
    return {**IFEVAL, "meta": {"instruction_id_list": names, "kwargs": arguments}}


RECORD_ERRORS: dict[str, tuple[object, str]] = {
    "no id": (_without(GSM8K, "id"), "the field 'id' is missing"),
    "id is a number": ({**GSM8K, "id": 3}, "the field 'id' is missing or not a string"),
    "no task": (_without(GSM8K, "task"), "the field 'task' is missing"),
    "unknown task": ({**GSM8K, "task": "gsm9k"}, "Unknown task 'gsm9k'. Did you mean 'gsm8k'"),
    "no prompt": (_without(GSM8K, "prompt"), "the field 'prompt' is missing"),
    "turns where one prompt belongs": (
        {**_without(GSM8K, "prompt"), "turns": ["a"]},
        "the field 'prompt' is missing or not a string",
    ),
    "both": ({**TWO_TURNS, "prompt": "a"}, "both 'prompt' and 'turns' are given"),
    "no turns": ({**TWO_TURNS, "turns": []}, "the field 'turns' must be a list of at least one string"),
    "turns of numbers": ({**TWO_TURNS, "turns": [1]}, "the field 'turns' must be a list of at least one string"),
    "turns is a string": ({**TWO_TURNS, "turns": "a"}, "the field 'turns' is missing or not a list"),
    "no answer": (_without(GSM8K, "answer"), "the field 'answer' is missing"),
    "answer is a number": ({**GSM8K, "answer": 18}, "the field 'answer' is missing or not a string"),
    "no tests": (_without(HUMANEVAL, "tests"), "the field 'tests' is missing or not a string"),
    "tests are one string": ({**MBPP, "tests": "assert 1"}, "the field 'tests' is missing or not a list"),
    "tests are numbers": ({**MBPP, "tests": [1]}, "the field 'tests' must be a list of at least one assert"),
    "entry point without a name": (
        {**HUMANEVAL, "entry_point": ""},
        "'entry_point' must name a function, and it is ''",
    ),
    "entry point of a call": ({**MBPP, "entry_point": "f(1)"}, "'entry_point' must name a function, and it is 'f(1)'"),
    "no entry point": (_without(MBPP, "entry_point"), "the field 'entry_point' is missing"),
    "no instructions": ({**IFEVAL, "meta": {"kwargs": []}}, "the field 'meta.instruction_id_list' is missing"),
    "question without turns": ({"question_id": 1, "turns": None}, "the field 'turns' is missing or not a list"),
    "problem without tests": (
        {"question_id": "a", "question_content": "b"},
        "the field 'public_test_cases' is missing",
    ),
    "MBPP without tests": (
        {"task_id": 1, "text": "t", "code": "c", "test_list": []},
        "the field 'entry_point' is missing",
    ),
    "no tests at all": ({**MBPP, "tests": []}, "the field 'tests' must be a list of at least one assert"),
    "a blank test": ({**MBPP, "tests": ["assert 1", " "]}, "each a string that is not blank"),
    "no meta": ({**MBPP, "meta": None}, "the field 'meta' is not an object"),
    "no setup": ({**MBPP, "meta": {"test_setup_code": None}}, "its 'test_setup_code' is not a string"),
    "tests without check": ({**HUMANEVAL, "tests": "x = 1"}, "the field 'tests' does not define check"),
    "an empty answer": ({**GSM8K, "answer": ""}, "the field 'answer' must hold a number, and it is ''"),
    "an answer that is no number": ({**GSM8K, "answer": "."}, "must hold a number, and it is '.'"),
    "an option that is no letter": ({**MMLU, "answer": "42"}, "must be one letter of A to J, and it is '42'"),
    "an unknown instruction": (_ifeval(["punctuation:no_coma"], [{}]), "did you mean 'punctuation:no_comma'"),
    "an instruction without arguments": (_ifeval(["punctuation:no_comma"], []), "one object for each entry"),
    "arguments that are no object": (_ifeval(["punctuation:no_comma"], [None]), "one object for each entry"),
    "no instruction": (_ifeval([], []), "and at least one"),
    "an argument that is missing": (
        _ifeval(["length_constraints:number_words"], [{"relation": "at least", "num_words": None}]),
        "'num_words' of the instruction 'length_constraints:number_words' must be a whole number of at least 1, and it",
    ),
    "a relation that is none": (
        _ifeval(["length_constraints:number_words"], [{"relation": "more than", "num_words": 5}]),
        "'relation' of the instruction 'length_constraints:number_words' must be 'less than' or 'at least'",
    ),
    "a count of 0": (_ifeval(["detectable_format:number_bullet_lists"], [{"num_bullets": 0}]), "and it is 0"),
    "one word for a list": (_ifeval(["keywords:existence"], [{"keywords": "cat"}]), "a list of texts that are not"),
    "an unknown language": (_ifeval(["language:response_language"], [{"language": "xx"}]), "and it is 'xx'"),
    "letters for a letter": (
        _ifeval(["keywords:letter_frequency"], [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}]),
        "must be one character, and it is 'ab'",
    ),
    "a paragraph beyond the last": (
        _ifeval(
            ["length_constraints:nth_paragraph_first_word"],
            [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}],
        ),
        "is 3, of 2 paragraphs",
    ),
    "an argument of another": (_ifeval(["punctuation:no_comma"], [{"num_words": 5}]), "has no argument 'num_words'"),
    "a problem whose tests are no JSON": (
        {"question_id": "a", "question_content": "b", "public_test_cases": "oops"},
        "the test cases cannot be read",
    ),
    "a problem whose tests are nested without end": (
        {"question_id": "a", "question_content": "b", "public_test_cases": "[" * 100_000},
        "the test cases cannot be read (RecursionError",
    ),
    "a problem whose hidden tests are damaged": (
        {"question_id": "a", "question_content": "b", "public_test_cases": "[]", "private_test_cases": "oops"},
        "the test cases cannot be read",
    ),
    "a method whose test is no JSON": (
        {
            "question_id": "a",
            "question_content": "b",
            "public_test_cases": json.dumps([{"input": "oops", "output": "1", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "f"}),
        },
        "a test of a method holds no JSON",
    ),
    "an instruction that is no text": ({"instruction": None}, "the field 'prompt' is missing"),
    "a solution that is no text": ({"question_id": 1, "turns": 3}, "the field 'turns' is missing or not a list"),
}


@pytest.mark.parametrize("case", RECORD_ERRORS)
def test_records_that_lack_something_are_named_with_the_line(case: str, write: Write) -> None:
    record, message = RECORD_ERRORS[case]
    with pytest.raises(DataError) as error:
        load_items(write(GSM8K, record))
    assert "set.jsonl, line 2: " in str(error.value)
    assert message in str(error.value)


def test_files_that_may_not_be_read_are_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended in a traceback."""
    path = write(GSM8K)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("dropmatch.bench.tasks.load._opened", refuse)
    with pytest.raises(DataError, match=r"set\.jsonl cannot be read \(Permission denied\)"):
        load_items(path)
    with pytest.raises(DataError, match=r"cannot be read \(File name too long\)"):
        load_items("x" * 5000)


def test_an_id_that_comes_twice_is_named_with_both_lines(write: Write) -> None:
    with pytest.raises(DataError, match=r"line 3: the id 'gsm8k/0' is taken already \(.*line 1\)"):
        load_items(write(GSM8K, {**GSM8K, "id": "b"}, GSM8K))


def test_too_few_items_are_told(write: Write) -> None:
    with pytest.raises(DataError, match="has 1 items, and 3 were asked for"):
        load_items(write(GSM8K), 3)
    with pytest.raises(DataError, match="has 1 items, and those from 1 on"):
        load_items(write(GSM8K), start=1)
    with pytest.raises(ConfigError, match="start=-1"):
        load_items(write(GSM8K), start=-1)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        load_items(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"is no file\. Give a file of items, humaneval_plus, komt_bench"):
        load_items(tmp_path)


# --- public shapes ---

SHAPES: dict[str, tuple[dict[str, Any], str, str, str]] = {  # record, id, task, start of the prompt
    "MT-bench": ({"question_id": 81, "category": "math", "turns": ["Add.", "Why?"]}, "mt_bench/81", "mt_bench", "Add."),
    "KoMT-bench": (
        {"question_id": 82, "category": "writing", "turns": ["편지를 써 주세요.", "다시."], "reference": []},
        "komt_bench/82",
        "komt_bench",
        "편지를",
    ),
    "Spec-Bench": (
        {"question_id": 300, "category": "translation", "turns": ["Translate German."]},
        "spec_bench/300",
        "spec_bench/translation",
        "Translate",
    ),
    "Alpaca": (
        {"instruction": "Sum up.", "input": "A text.", "output": "Text."},
        "alpaca/0000",
        "alpaca",
        "Sum up.\n\nA text.",
    ),
    "Alpaca without input": ({"instruction": "Name a tree.", "input": ""}, "alpaca/0000", "alpaca", "Name a tree."),
    "GSM8K": (
        {"question": "How many?", "answer": "2 + 2 = 4\n#### 1,004"},
        "gsm8k/0000",
        "gsm8k",
        "How many?\nThink step by step",
    ),
    "HumanEval": (
        {"task_id": "HumanEval/7", "prompt": "def f():\n", "test": "def check(c): pass", "entry_point": "f"},
        "HumanEval/7",
        "humaneval",
        "Complete this Python function.",
    ),
    "MBPP": (
        {"task_id": 3, "text": "Do.", "code": "def g(): pass\ndef f(): g()", "test_list": ["assert f() is None"]},
        "mbpp/3",
        "mbpp",
        "Do.\nThe code should pass these tests:\n\n```python\nassert f() is None\n```",
    ),
    "IFEval": (
        {"key": 5, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        "ifeval/5",
        "ifeval",
        "No commas.",
    ),
    "HumanEval+": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "canonical_solution": "    return x\n",
            "entry_point": "f",
            "base_input": [[1]],
            "plus_input": [],
        },
        "HumanEval/0",
        "humaneval_plus",
        "Complete this Python function.",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_records_of_public_sets_are_known_by_their_fields(case: str, one: Callable[..., Item]) -> None:
    record, name, task, prompt = SHAPES[case]
    item = one(record)
    assert (item.id, item.task) == (name, task)
    assert item.prompt.startswith(prompt)


def test_a_split_under_a_name_of_its_own_is_its_task(one: Callable[..., Item]) -> None:
    item = one(GSM8K | {"id": "gsm8k/train/0", "task": "gsm8k_train"})
    assert (item.id, item.task) == ("gsm8k/train/0", "gsm8k")
    assert one(GSM8K | {"task": "gsm8k_train"}, task="gsm8k").task == "gsm8k"
    with pytest.raises(DataError, match="Unknown task 'gsm8k_trian'"):
        one(GSM8K | {"task": "gsm8k_trian"})


def test_references_and_answers_of_public_sets_are_kept(one: Callable[..., Item]) -> None:
    assert one(SHAPES["GSM8K"][0]).record["answer"] == "1004"
    assert one(SHAPES["MBPP"][0]).record["entry_point"] == "f"
    question = {"question_id": 1, "category": "math", "turns": ["a"], "reference": ["b"]}
    assert one(question).record["meta"] == {"question_id": 1, "category": "math", "reference": ["b"]}
    sums = {"question_id": 401, "category": "math_reasoning", "turns": ["a"], "reference": ["1 + 1\n#### 1,002"]}
    assert one(sums).record["answer"] == "1002"


def test_the_task_of_questions_in_common_form_can_be_said(one: Callable[..., Item], write: Write) -> None:
    question = {"question_id": 1, "category": "writing", "turns": ["Name a tree."]}
    assert one(question, task="alpaca").task == "alpaca"
    assert one(question, task="spec_bench").task == "spec_bench/mt_bench"
    assert one(GSM8K, task="gsm8k").task == "gsm8k"
    assert load_items(f"alpaca:{write(question)}")[0].task == "alpaca"
    with pytest.raises(DataError, match="line 1: an item of 'gsm8k', and 'alpaca' was asked for"):
        one(GSM8K, task="alpaca")
    with pytest.raises(UnknownNameError, match="Unknown task 'alpacca'"):
        one(question, task="alpacca")


# --- named sources ---


def test_sets_on_the_hub_are_downloaded_file_by_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, file: str, *, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        return str(write({"question_id": len(asked), "turns": ["a"]}, name=f"{len(asked)}.jsonl"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert [item.id for item in load_items("hub:someone/set/data/a.jsonl")] == ["mt_bench/1"]
    assert asked == [("someone/set", "data/a.jsonl", "dataset")]
    assert len(load_items("komt_bench")) == 1
    assert len(load_items("livecodebench")) == 5
    assert asked[-1] == ("livecodebench/code_generation_lite", "test5.jsonl", "dataset")
    with pytest.raises(ConfigError, match="hub:OWNER/NAME/FILE"):
        load_items("hub:someone")


def test_a_hub_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str, **__: str) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(DataError, match="Download the file and give its path"):
        load_items("komt_bench")


def test_humaneval_plus_comes_from_the_file_of_the_variable(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUMANEVAL_OVERRIDE_PATH", raising=False)
    with pytest.raises(ConfigError, match="HUMANEVAL_OVERRIDE_PATH"):
        load_items("humaneval_plus")
    path = write(SHAPES["HumanEval+"][0], name="plus.jsonl.gz")
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(path))
    assert load_items("humaneval_plus")[0].task == "humaneval_plus"


# --- wording ---


def test_every_task_says_how_to_answer_where_scoring_needs_it(one: Callable[..., Item]) -> None:
    assert one(GSM8K).turns == ("How many?\nThink step by step, and give the answer as a number on the last line.",)
    assert one(HUMANEVAL).prompt.endswith(f"```python\n{HUMANEVAL['prompt']}```")
    assert "assert double(2) == 4\nassert double(ZERO) == 0" in one(MBPP).prompt
    option = one(MMLU)
    assert option.prompt.startswith("About.\n\nWhich?\nA. x")
    assert option.prompt.endswith('"The answer is X", where X is the letter of the right option.')
    assert "Answer:" not in option.prompt
    assert one(IFEVAL).turns == ("Use no commas.",)
    assert one(TWO_TURNS).turns == ("Write.", "Rewrite.")
    assert one({"id": "a", "task": "prompts", "prompt": "Hi"}).turns == ("Hi",)


def test_wording_keeps_braces_and_placeholders(one: Callable[..., Item]) -> None:
    assert one({**GSM8K, "prompt": "{} {0} %s {prompt}"}).prompt.startswith("{} {0} %s {prompt}\n")


def test_every_task_has_room_for_its_answers() -> None:
    room = {"gsm8k": 400, "humaneval": 512, "mbpp": 400, "mmlu": 256, "ifeval": 640, "mt_bench": 512}
    assert {name: TASKS[name].max_new_tokens for name in room} == room
    assert all(task.max_new_tokens == 512 for name, task in TASKS.items() if name.startswith("spec_bench/"))


# --- numbers ---

NUMBERS = {
    "So she makes 9 * 2 = $18.": "18",
    "**18**": "18",
    "The answer is $1,018.50 in all": "1018.50",
    "It is -7": "-7",
    "18 ducks\n#### 20": "20",
}


@pytest.mark.parametrize("answer", NUMBERS)
def test_the_last_number_counts(answer: str, one: Callable[..., Item]) -> None:
    assert score(one({**GSM8K, "answer": NUMBERS[answer]}), [answer]).correct is True
    assert score(one({**GSM8K, "answer": "19"}), [answer]).correct is False


def test_strict_scoring_needs_the_marks(one: Callable[..., Item]) -> None:
    item = one(GSM8K)
    marked, plain = score(item, ["... #### 18"]), score(item, ["It is 18"])
    assert (marked.correct, marked.metrics) == (True, {"flexible": 1.0, "strict": 1.0})
    assert (plain.correct, plain.metrics, plain.extracted) == (True, {"flexible": 1.0, "strict": 0.0}, "18")
    assert strict_number("#### 1 and #### 2") == "1"


@pytest.mark.parametrize("answer", ["", "none at all", "-"])
def test_answers_without_a_number_are_wrong(answer: str, one: Callable[..., Item]) -> None:
    assert flexible_number(answer) is None
    assert score(one(GSM8K), [answer]).correct is False


# --- letters ---

LETTERS = {
    "Because. The answer is B": "B",
    "The answer is (B).": "B",
    "The answer is: **B**": "B",
    "The answer is **B. y**": "B",
    "the answer is $\\boxed{B}$": "B",
    "The answer is A. No: the answer is B.": "B",
    "I think so.\n\nB": "B",
    "So:\n**(B)**\n": "B",
    "The answer is a hard one to find.": None,
    "A is wrong, and so is C.": None,
    "The answer is Basic.": None,
    "": None,
}


@pytest.mark.parametrize("answer", LETTERS)
def test_the_letter_named_last_counts(answer: str, one: Callable[..., Item]) -> None:
    assert extract_letter(answer) == LETTERS[answer]
    result = score(one(MMLU), [answer])
    assert result.correct is (LETTERS[answer] == "B")
    assert result.metrics == {"has_letter": float(LETTERS[answer] is not None)}


# --- code ---


def test_blocks_end_where_the_answer_ends_and_lose_their_indentation() -> None:
    assert code_blocks("a\n```python\nx\n```\nb\n  ```\n  y\n    z\n  ```\n```\n") == ["x\n", "y\n  z\n"]
    assert code_blocks("```python\ndef f():\n    return 1") == ["def f():\n    return 1\n"]
    assert extract_code("no block", "f") == "no block"
    two = "```\npip install x\n```\n```python\ndef f(): pass\n```"
    assert extract_code(two, "f") == "def f(): pass\n"
    assert extract_code(two, "g") == "pip install x\n"


RIGHT_CODE = {
    "whole function": "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles.",
    "body alone": "```python\n    return 2 * x\n```",
    "no block": "def double(x):\n    return x + x",
    "names of the prompt": "```python\ndef double(x):\n    return int(math.fsum([x, x]))\n```",
    "cut short after its end": "```python\ndef double(x):\n    return 2 * x\n\n# and now",
    "with a script's end": "```python\ndef double(x): return 2 * x\nif __name__ == '__main__':\n    input()\n```",
}


@pytest.mark.parametrize("case", RIGHT_CODE)
def test_right_functions_pass(case: str, one: Callable[..., Item]) -> None:
    assert score(one(HUMANEVAL), [RIGHT_CODE[case]]).correct is True


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "```python\ndef double(x):\n    return x\n```",
        "```python\nimport sys; sys.exit(0)\n```",
        "I cannot.",
        "```\n```",
    ],
)
def test_wrong_functions_fail(answer: str, one: Callable[..., Item]) -> None:
    assert score(one(HUMANEVAL), [answer]).correct is False
    assert score(one(MBPP), [answer]).correct is False


def test_mbpp_runs_its_setup_before_the_tests(one: Callable[..., Item]) -> None:
    result = score(one(MBPP), [f"```python\n{MBPP['answer']}\n```"])
    assert result.correct is True
    assert result.extracted == f"{MBPP['answer']}\n"


# --- HumanEval+ ---

PLUS = {
    "task_id": "HumanEval/0",
    "prompt": "def half(x):\n",
    "canonical_solution": "    return x / 2\n",
    "entry_point": "half",
    "base_input": [[2], [4]],
    "plus_input": [[1], [0]],
    "atol": 0,
}


@pytest.mark.parametrize(
    ("code", "base", "plus"),
    [
        ("return x / 2", 1.0, 1.0),
        ("return x / 2 + 1e-9", 1.0, 1.0),  # floats may differ a little
        ("return x // 2", 1.0, 0.0),
        ("return 'half'", 0.0, 0.0),
        ("return x / 2 if x else exit()", 1.0, 0.0),
        ("raise ValueError", 0.0, 0.0),
    ],
)
def test_plus_inputs_are_compared_with_the_canonical_solution(
    code: str, base: float, plus: float, one: Callable[..., Item]
) -> None:
    result = score(one(PLUS), [f"```python\ndef half(x):\n    {code}\n```"])
    assert result.metrics == {"base": base, "plus": plus, "timeout": 0.0}
    assert result.correct is (plus == 1.0)


def test_any_root_will_do(one: Callable[..., Item]) -> None:
    record = {**PLUS, "entry_point": "find_zero", "prompt": "def find_zero(xs):\n", "atol": 1e-4}
    record |= {"canonical_solution": "    return 2.0\n", "base_input": [[[-4, 0, 1]]], "plus_input": []}
    for value, is_right in (("-2.00000001", True), ("1.9", False), ("'2'", False), ("float('nan')", False)):
        assert score(one(record), [f"```\ndef find_zero(xs): return {value}\n```"]).correct is is_right


def test_a_canonical_solution_that_fails_is_no_verdict(one: Callable[..., Item]) -> None:
    with pytest.raises(DataError, match=r"HumanEval/0: the canonical solution fails .*ZeroDivisionError"):
        score(one({**PLUS, "canonical_solution": "    return x / 0\n"}), ["```\ndef half(x): return x / 2\n```"])


def test_results_are_compared_by_type_and_tolerance() -> None:
    assert is_same([1.0, 2.0], [1.0, 2.0 + 1e-8], 0)
    assert is_same((1, "a"), (1, "a"), 0)
    assert not is_same((1.0, 2.0), [1.0, 2.0 + 1e-8], 0)
    assert not is_same([1.0], [1.0, 2.0], 0)
    assert not is_same(1, 2, 0)
    assert is_same(1.0, 1.05, 0.1)
    assert not is_same("1.0", 1.0, 0.1)
    assert not is_same(["a"], ["b"], 0.1)


# --- LiveCodeBench ---


def packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


SCRIPT = {
    "question_id": "abc1",
    "question_content": "Add two numbers.",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "5 -7", "output": "-2.0", "testtype": "stdin"}]),
    "metadata": "{}",
}
METHOD = {
    "question_id": "3001",
    "question_content": "Add all.",
    "starter_code": "class Solution:\n    def addAll(self, nums: List[int], start: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
    "private_test_cases": packed([{"input": "[]\n0", "output": "0", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "addAll"}),
}
ADD = "print(sum(map(int, input().split())))"
METHOD_CODE = "class Solution:\n    def addAll(self, nums: List[int], start: int) -> int:\n        return {}"


@pytest.mark.parametrize(
    ("code", "share"),
    [
        (ADD, 1.0),
        (f"import sys\nif __name__ == '__main__':\n    {ADD}\n    sys.exit()", 1.0),
        ("print(sum(map(int, sys.stdin.read().split())))", 1.0),  # names that contest sites import
        ("print(3)", 0.5),
        ("print('3 4')", 0.0),
        (f"{ADD}\n1 / 0", 0.0),
        ("import os; print(3, flush=True); os._exit(0)", 0.0),
    ],
)
def test_scripts_are_judged_by_what_they_print(code: str, share: float, one: Callable[..., Item]) -> None:
    item = one(SCRIPT)
    assert "standard input" in item.prompt
    result = score(item, [f"So:\n```python\n{code}\n```\n"])
    assert result.metrics == {"tests_passed": share}
    assert result.correct is (share == 1.0)


@pytest.mark.parametrize(
    ("code", "share"),
    [
        (METHOD_CODE.format("sum(nums) + start"), 1.0),
        (METHOD_CODE.format("6"), 0.5),
        (METHOD_CODE.format("type('Equal', (), {'__eq__': lambda *a: True})()"), 0.0),
        ("def addAll(nums, start): return sum(nums, start)", 1.0),
        ("def add(nums, start): return sum(nums, start)", 0.0),
    ],
)
def test_methods_are_judged_by_what_they_return(code: str, share: float, one: Callable[..., Item]) -> None:
    item = one(METHOD)
    assert METHOD["starter_code"] in item.prompt
    assert score(item, [f"```python\n{code}\n```"]).metrics == {"tests_passed": share}


def test_the_last_block_is_the_program() -> None:
    assert extract_program("```python\na\n```\nor\n```python\nb\nc\n```\nend") == "b\nc"
    assert extract_program("```python\nb") == ""
    assert extract_program("") == ""


def test_outputs_match_line_by_line_or_as_numbers() -> None:
    assert same_output("1  \n2\n\n", "\n1\n2")
    assert same_output("1.50 2", "1.5 2.0")
    assert not same_output("1 2", "1\n2")
    assert not same_output("a", "b")
    assert not same_output("100000000000000000001", "100000000000000000002")


class Malice:
    """Its pickle would make a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.folder,)


def test_hidden_tests_that_would_run_code_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    data = base64.b64encode(zlib.compress(pickle.dumps(Malice(str(folder))))).decode()
    with pytest.raises(DataError, match=r"the pickle asks for posix\.mkdir"):
        read_tests({**SCRIPT, "private_test_cases": data})
    assert not folder.exists()


@pytest.mark.parametrize(
    "data", ["oops", "b29wcw==", packed([])[:-8], "3", '[{"input": "a"}]', packed([{"input": "a"}])]
)
def test_hidden_tests_that_cannot_be_read_are_told(data: str) -> None:
    with pytest.raises(DataError, match="the test cases cannot be read"):
        read_tests({**SCRIPT, "private_test_cases": data})


def test_hidden_tests_may_be_plain_or_missing() -> None:
    plain = json.dumps([{"input": "a", "output": "b", "testtype": "stdin"}])
    assert len(read_tests({**SCRIPT, "private_test_cases": plain})) == 2
    assert len(read_tests(_without(SCRIPT, "private_test_cases"))) == 1


def test_bad_metadata_and_bad_method_tests_are_told(one: Callable[..., Item]) -> None:
    answer = [f"```python\n{METHOD_CODE.format(0)}\n```"]
    with pytest.raises(DataError, match="'metadata' is no JSON object"):
        score(one({**METHOD, "metadata": "[]"}), answer)
    with pytest.raises(DataError, match="is no name of a method"):
        score(one({**METHOD, "metadata": {"func_name": "f();g"}}), answer)
    bad = json.dumps([{"input": "[1,", "output": "6", "testtype": "functional"}])
    with pytest.raises(DataError, match="a test of a method holds no JSON"):
        score(one({**METHOD, "public_test_cases": bad}), answer)


# --- all together ---


def test_scores_come_in_the_order_of_the_items(write: Write) -> None:
    items = load_items(write(GSM8K, HUMANEVAL, MBPP, TWO_TURNS, {**HUMANEVAL, "id": "b"}, MMLU))
    right = f"```python\n{MBPP['answer']}\n```"
    answers = [["18"], [right], ["junk"], ["one", "two"], ["junk"], ["The answer is B"]]
    assert [one.correct for one in score_all(items, answers)] == [True, True, False, None, False, True]
    assert score_all([], []) == []


def test_after_an_error_no_more_programs_are_run(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waited for the programs of all answers."""
    items = load_items(write(*({**MBPP, "id": f"mbpp/{i}"} for i in range(50))))
    begun: list[str] = []

    def score_one(item: Item, answers: object) -> None:
        begun.append(item.id)
        time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setitem(TASKS, "mbpp", replace(TASKS["mbpp"], score=score_one))
    with pytest.raises(KeyboardInterrupt):
        score_all(items, [["a"]] * len(items))
    assert len(begun) < len(items)


def test_answers_must_fit_the_turns(write: Write) -> None:
    two, single = load_items(write(TWO_TURNS, GSM8K))
    for item, answers in ((two, ["one"]), (single, ["a", "b"]), (single, [])):
        with pytest.raises(ConfigError, match="turns, and"):
            score(item, answers)
    with pytest.raises(ConfigError, match="a string came"):
        score(single, "18")
    with pytest.raises(ConfigError, match="1 items and 2 lists"):
        score_all([single], [["a"], ["b"]])


def test_instructions_need_the_extra(one: Callable[..., Item], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ifeval.importlib.util, "find_spec", lambda name: None)
    ifeval._checkers.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"lm_eval, .* cannot be imported.*pip install dropmatch\[eval\]"):
            score(one(IFEVAL), ["no commas here"])
    finally:
        ifeval._checkers.cache_clear()


def test_instruction_figures_are_pooled_over_all_instructions() -> None:
    one = {"prompt_level_strict": 1.0, "prompt_level_loose": 1.0, "instructions": 1.0}
    three = {"prompt_level_strict": 0.0, "prompt_level_loose": 0.0, "instructions": 3.0}
    pooled = pooled_metrics(
        [one | {"followed_strict": 1.0, "followed_loose": 1.0}, three | {"followed_strict": 1.0, "followed_loose": 2.0}]
    )
    assert pooled == {
        "prompt_level_strict": 0.5,
        "prompt_level_loose": 0.5,
        "inst_level_strict": 0.5,
        "inst_level_loose": 0.75,
        "ifeval_mean": pytest.approx((0.5 + 0.5 + 0.5 + 0.75) / 4),
    }
    assert pooled_metrics([{"a": 1.0}, {"a": 0.0, "b": 3.0}]) == {"a": 0.5, "b": 3.0}
    assert pooled_metrics([]) == {}
