"""Scores against lm-evaluation-harness, and the sets' own reference answers against the sandbox."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from dropmatch.bench.tasks import Item, load_items, pooled_metrics, score, score_all
from dropmatch.bench.tasks import instructions as ifeval
from dropmatch.bench.tasks.numbers import score_number
from dropmatch.errors import ConfigError

NO_HARNESS = "needs lm-evaluation-harness (pip install dropmatch[eval])"


# --- GSM8K ---

_PIECES = [
    "18",
    "-7",
    "$",
    ",",
    ".",
    "1,018",
    "3.50",
    "####",
    "#### ",
    " ",
    "\n",
    "the answer is ",
    "-",
    "0",
    "**",
    "½",
]


def _made_answers() -> list[str]:
    """Texts made of what answers are made of, in any order, and none at all."""
    draw = random.Random(7)
    made = ["".join(draw.choices(_PIECES, k=draw.randint(1, 9))) for _ in range(600)]
    return ["", "#### 18", "... #### 1,018.", "$18.", "#### -7 and 18", "18.00", *made]


@pytest.fixture(scope="module")
def harness_gsm8k() -> dict[str, Any]:
    """lm-evaluation-harness's own GSM8K task as its file has it."""
    lm_eval = pytest.importorskip("lm_eval", reason=NO_HARNESS)
    yaml = pytest.importorskip("yaml")
    path = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    task: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return task


@pytest.mark.parametrize(("kind", "name"), [("flexible", "flexible-extract"), ("strict", "strict-match")])
def test_gsm8k_scores_equal_those_of_the_harness(kind: str, name: str, harness_gsm8k: dict[str, Any]) -> None:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    steps = next(one["filter"] for one in harness_gsm8k["filter_list"] if one["name"] == name)
    options = {key: value for key, value in steps[0].items() if key != "function"}
    settings = harness_gsm8k["metric_list"][0]
    settings = {key: settings[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    answers = _made_answers()
    filtered = [
        found[0] for found in RegexFilter(**options).apply([[answer] for answer in answers], [{}] * len(answers))
    ]
    verdicts = set()
    for reference in ("18", "-7", "1018", "3.50"):
        item = Item("gsm8k/0", "gsm8k", ("?",), {"answer": reference}, (), 1)
        for answer, found in zip(answers, filtered, strict=True):
            solution = f"So.\n#### {reference}"
            theirs = exact_match_hf_evaluate(predictions=[found], references=[solution], **settings)["exact_match"]
            ours = score_number(item, [answer])
            assert ours.metrics[kind] == float(theirs), (answer, reference)
            verdicts.add(theirs)
            if kind == "flexible":
                assert ours.correct is bool(theirs)
                assert (ours.extracted or "[invalid]") == found
    assert len(verdicts) == 2  # both right and wrong answers were among them


# --- IFEval ---

_RECORDS: list[tuple[list[str], list[dict[str, Any]]]] = [
    (["punctuation:no_comma"], [{}]),
    (["length_constraints:number_sentences"], [{"num_sentences": 3, "relation": "at least"}]),
    (["change_case:english_capital"], [{}]),
    (["language:response_language", "keywords:existence"], [{"language": "de"}, {"keywords": ["Haus", "Baum"]}]),
    (["detectable_format:json_format"], [{"num_bullets": None}]),
    (["combination:repeat_prompt"], [{"prompt_to_repeat": "Say it again."}]),
    (
        ["startend:quotation", "detectable_format:title", "length_constraints:number_words"],
        [{}, {}, {"num_words": 5, "relation": "less than"}],
    ),
]
_TEXTS = [
    "",
    "   ",
    "Hello, there. This is a text. It has three sentences.",
    "ALL OF THIS IS LOUD",
    "Das Haus steht neben dem Baum. Es ist ein altes Haus.",
    '```json\n{"a": 1}\n```',
    "Say it again. And so on",
    '"<<A title>> is here"',
    "First line, with a comma\nall good here\nLast line, with a comma",
    "*ALL OF THIS* IS LOUD",
]


@pytest.fixture(scope="module")
def harness_ifeval() -> Iterator[Any]:
    """lm-evaluation-harness's own IFEval functions."""
    pytest.importorskip("lm_eval", reason=NO_HARNESS)
    try:
        yield ifeval._checkers()
    except ConfigError as error:
        pytest.skip(str(error))


def _compare(items: Sequence[Item], answers: Sequence[str], harness: Any) -> None:
    theirs: list[dict[str, Any]] = []
    scores = score_all(items, [[answer] for answer in answers])
    for item, answer, ours in zip(items, answers, scores, strict=True):
        meta = item.record["meta"]
        result = harness.process_results({**meta, "prompt": item.record["prompt"]}, [answer])
        assert ours.correct is result["prompt_level_strict_acc"]
        assert ours.metrics == {
            "prompt_level_strict": float(result["prompt_level_strict_acc"]),
            "prompt_level_loose": float(result["prompt_level_loose_acc"]),
            "followed_strict": float(sum(result["inst_level_strict_acc"])),
            "followed_loose": float(sum(result["inst_level_loose_acc"])),
            "instructions": float(len(meta["instruction_id_list"])),
        }
        theirs.append(result)
    pooled = pooled_metrics([one.metrics for one in scores])
    for kind in ("strict", "loose"):
        wanted = harness.agg_inst_level_acc([one[f"inst_level_{kind}_acc"] for one in theirs])
        assert pooled[f"inst_level_{kind}"] == pytest.approx(wanted)
    assert 0 < pooled["prompt_level_strict"] < 1


def test_ifeval_scores_equal_those_of_the_harness(harness_ifeval: Any) -> None:
    items, answers = [], []
    for number, (names, options) in enumerate(_RECORDS):
        meta = {"key": number, "instruction_id_list": names, "kwargs": options}
        record = {"prompt": "Say it again.", "meta": meta}
        for text in _TEXTS:
            items.append(Item(f"ifeval/{number}", "ifeval", ("Say it again.",), record, (), 1))
            answers.append(text)
    _compare(items, answers, harness_ifeval)


def test_the_kinds_of_instructions_are_those_of_the_harness(harness_ifeval: Any) -> None:
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    assert set(INSTRUCTION_DICT) == set(ifeval.ARGUMENTS)


def test_the_arguments_of_instructions_are_those_of_the_harness(harness_ifeval: Any) -> None:
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT
    from lm_eval.tasks.ifeval.instructions_util import LANGUAGE_CODES

    assert set(LANGUAGE_CODES) == ifeval.LANGUAGES
    for name, kinds in ifeval.ARGUMENTS.items():
        parameters = signature(INSTRUCTION_DICT[name].build_description).parameters
        assert set(parameters) - {"self"} == set(kinds), name


def test_ifeval_scores_of_the_real_prompts_equal_those_of_the_harness(shared_dir: Path, harness_ifeval: Any) -> None:
    items = load_items(shared_dir / "data" / "ifeval.jsonl")[::4]
    draw = random.Random(3)
    _compare(items, [draw.choice([*_TEXTS, item.prompt, item.prompt.upper()]) for item in items], harness_ifeval)


# --- reference answers of the shared sets ---


def _block(code: str) -> list[str]:
    return [f"Here it is:\n```python\n{code}\n```\n"]


@pytest.mark.parametrize(("name", "count"), [("humaneval", 82), ("mbpp", 300)])
def test_all_reference_answers_pass_and_junk_fails(name: str, count: int, shared_dir: Path) -> None:
    items = load_items(shared_dir / "data" / f"{name}.jsonl")
    assert len(items) == count
    scores = score_all(items, [_block(item.record["answer"]) for item in items])
    assert [item.id for item, one in zip(items, scores, strict=True) if not one.correct] == []
    some = items[::6]
    junk = [_block(f"def {item.record['entry_point']}(*_, **__): return None") for item in some]
    assert not any(one.correct for one in score_all(some, junk))


def test_all_number_and_letter_answers_pass_and_others_fail(shared_dir: Path) -> None:
    for name in ("gsm8k", "mmlu"):
        items = load_items(shared_dir / "data" / f"{name}.jsonl")
        right = [[f"Because.\nThe answer is {item.record['answer']}"] for item in items]
        assert all(one.correct for one in score_all(items, right))
        assert not any(one.correct for one in score_all(items, [["Because 123457 is E."]] * len(items)))
    solutions = load_items(shared_dir / "data" / "gsm8k.jsonl")
    strict = score_all(solutions, [[item.record["meta"]["solution"]] for item in solutions])
    assert all(one.metrics == {"flexible": 1.0, "strict": 1.0} for one in strict)


def test_shared_sets_without_truth_have_turns_and_no_verdict(shared_dir: Path) -> None:
    talks = load_items(shared_dir / "data" / "mt_bench.jsonl")
    assert {len(item.turns) for item in talks} == {2}
    assert score(talks[0], ["a", "b"]).correct is None
    mixed = load_items(shared_dir / "data" / "spec_bench.jsonl")
    verdicts = {item.task: score(item, ["1"] * len(item.turns)).correct for item in mixed}
    sums = verdicts.pop("spec_bench/math_reasoning")
    assert sums in (True, False)
    assert set(verdicts.values()) == {None}
    assert len(verdicts) == 3
