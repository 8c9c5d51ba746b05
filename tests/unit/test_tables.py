"""Documents hold the tables that their results files give, and nothing typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dropmatch.bench.analyses import heads as heads_analysis
from dropmatch.bench.analyses.overhead import BODY, PLAIN, overhead_rows
from dropmatch.bench.analyses.radius import figures
from dropmatch.bench.autojudge import AutoJudgeSettings, curves, threshold_table
from dropmatch.bench.batch import batch_rows
from dropmatch.bench.tables import main, published, render, table
from dropmatch.bench.tasks import load_items
from dropmatch.errors import DataError, UnknownNameError
from tabled import column, tables

ROOT = Path(__file__).parents[2]
Result = dict[str, Any]
SPREAD = {"median": 1.5, "min": 1.0, "max": 2.0}
PROVENANCE = {"cpu": "A CPU", "num_threads": 2, "torch": "2.13.0", "device": "cpu", "command": "dropmatch do --it d/e"}
SETTINGS = {
    "target": "big",
    "draft": "small",
    "draft_length": 10,
    "max_new_tokens": 8,
    "k": 5,
    "p_drop": 0.3,
    "dtype": "torch.bfloat16",
    "temperature": 0.0,
    "items": ["a", "b"],
}
QUICK: Result = {
    "kind": "bench-quick",
    "settings": {**SETTINGS, "draft": None, "heads": "full"},
    "summary": {
        "plain": {"over_plain": {"median": 1.0, "min": 1.0, "max": 1.0}},
        "dropmatch L=5": {
            "over_plain": SPREAD,
            "over_lossless": SPREAD,
            "tau": 4.25,
            "judge_over_target": 0.125,
            "lossy_tokens": 3,
            "emitted": 16,
        },
    },
    "arms": {
        "plain": {"stats": {"emitted": 16, "time": {"decode_s": 8.0}}},
        "lossless L=5": {"stats": {"emitted": 16, "time": {"decode_s": 4.0}}},
        "dropmatch L=5": {"stats": {"emitted": 16, "time": {"decode_s": 3.2}}},
    },
    "provenance": PROVENANCE,
}


def shown(result: Result, tmp_path: Path, form: str = "") -> str:
    """The table of one result, from its file."""
    (tmp_path / "r.json").write_text(json.dumps(result))
    text = table([(tmp_path / "r.json", "results/r.json")], form)
    assert text.endswith("\n")
    assert "results/r.json" in text
    for line in result["provenance"]["command"].splitlines():
        assert f"`{line}`" in text
    return text


# -- captions -------------------------------------------------------------------------------------------------------


def test_a_file_that_was_extended_names_every_command(tmp_path: Path) -> None:
    first = {**PROVENANCE, "command": "dropmatch first"}
    text = shown({**QUICK, "provenance": {**PROVENANCE, "command": "dropmatch second", "earlier": [first]}}, tmp_path)
    assert "`dropmatch second`\nwhich extended what came of\n`dropmatch first`." in text


# -- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/results.md", "docs/closed-form.md", "docs/speed.md", "docs/vllm.md", "docs/performance.md"],
)
def test_tables_in_the_documents_are_those_of_the_results_files(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "results:begin results/" in text
    assert render(text, ROOT) == text


def test_a_table_is_written_between_its_marks_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.json").write_text(json.dumps(QUICK))
    document = tmp_path / "d.md"
    document.write_text("before\n<!-- results:begin r.json -->\nold\n<!-- results:end -->\nafter\n")
    monkeypatch.chdir(tmp_path)
    main([str(document)])
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| dropmatch L=5 | 1.50x (1.00-2.00) | 1.50x (1.00-2.00) | 1.25x | 4.25 | 12.5% | 3 of 16 |" in text
    assert "heads=full" in text
    assert "`dropmatch do --it d/e`" in text
    main([str(document)])
    assert document.read_text() == text


def test_documents_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No document was named"):
        main([])
    with pytest.raises(DataError, match=r"no document '.*none\.md'"):
        main([str(tmp_path / "none.md")])


def test_no_document_is_written_if_one_of_them_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text(json.dumps(QUICK))
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- results:begin r.json -->\n<!-- results:end -->\n")
    bad.write_text("<!-- results:begin none.json -->\n<!-- results:end -->\n")
    before = good.read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"none\.json does not exist"):
        main([str(good), str(bad)])
    assert good.read_text() == before


def test_missing_broken_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(DataError, match="does not exist"):
        table([(path, "r.json")])
    path.write_text('{"kind":\n')
    with pytest.raises(DataError, match=r"r\.json: not JSON"):
        table([(path, "r.json")])
    for text in ('{"kind": "other"}', '{"kind": ["compare"]}', "[]"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"holds .*bench-quick, .*compare"):
            table([(path, "r.json")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(QUICK).encode("utf-16"), "UTF-16"),
        (b"[" * 100_000, "nested too deep"),
        (json.dumps(QUICK).replace("4.25", "NaN").encode(), "NaN"),
        (json.dumps(QUICK).replace("max_new_tokens", "other").encode(), "'max_new_tokens' is missing"),
        (json.dumps(QUICK).replace("4.25", '"fast"').encode(), "a value is not what it should be"),
        (json.dumps({"kind": "compare", "summary": [{}]}).encode(), "is missing"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    """They ended in errors of Python, and NaN was printed as a figure."""
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"r\.json.*{message}"):
        table([(path, "r.json")])


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("q.json paper-6", UnknownNameError, "form of bench-quick"),
        ("c.json parreto", UnknownNameError, "Did you mean 'pareto'"),
        ("q.json q.json", DataError, "takes one file"),
        ("q.json c.json", DataError, "hold bench-quick and compare"),
        ("paper-6 c.json", DataError, "at most one form"),
        ("c.json pareto paper-6", DataError, "at most one form"),
        ("pareto", DataError, "give results files"),
    ],
)
def test_blocks_that_ask_for_no_table_are_refused(
    tmp_path: Path, words: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "q.json").write_text(json.dumps(QUICK))
    (tmp_path / "c.json").write_text(json.dumps(comparison()))
    with pytest.raises(error, match=message):
        render(f"<!-- results:begin {words} -->\n<!-- results:end -->\n", tmp_path)


# -- comparisons ----------------------------------------------------------------------------------------------------


def row(rule: str = "dropmatch", length: int = 5, task: str = "gsm8k", **others: Any) -> Result:
    """A row of a comparison's summary."""
    return {
        "rule": rule,
        "draft_length": length,
        "arm": f"{rule} L={length}",
        "task": task,
        "n": 16,
        "tau": 5.5,
        "tau_low": 5.25,
        "tau_high": 5.75,
        "accuracy": 0.5,
        "accuracy_low": 0.25,
        "accuracy_high": 0.75,
        "accuracy_difference": -0.125,
        "difference_low": -0.25,
        "difference_high": 0.0625,
        "p_value": 0.0312,
        "lossy_share": 0.025,
        "lossy_prob_mean": 0.2,
        "logprob_mean": -0.25,
        "logprob_difference": -0.0625,
        "length_ratio": 1.5,
        "repetition": 0.0625,
        "diverged_share": 0.75,
        "over_plain": None,
        "over_lossless": None,
        "pareto": False,
        **others,
    }


UNGRADED: Result = dict.fromkeys(
    ("accuracy", "accuracy_difference", "p_value", "lossy_prob_mean", "logprob_difference")
)


def comparison(*rows: Result, **settings: Any) -> Result:
    return {
        "kind": "compare",
        "settings": {**SETTINGS, **settings},
        "summary": list(rows or (row(),)),
        "provenance": PROVENANCE,
    }


def test_a_comparison_shows_what_rules_cost(tmp_path: Path) -> None:
    text = shown(comparison(row(pareto=True), row("lossless", **UNGRADED)), tmp_path)
    lines = text.splitlines()
    assert lines[2] == (
        "| dropmatch L=5 * | 5.50 (5.25-5.75) | 50.0 (25.0 to 75.0) | -12.5 (-25.0 to +6.2) | 0.031 | 2.50% | 0.20 | "
        "-0.250 | 1.500 | 6.2% | 75% |"
    )
    assert lines[3].startswith("| lossless L=5 | 5.50 (5.25-5.75) |  |  |  | 2.50% |  |")
    assert tables(text)
    assert "over plain" not in text
    for fact in ("2 prompts of gsm8k.", "`big` with `small`, bfloat16, K=5, p_drop=0.3", "at most 8 tokens each"):
        assert fact in text
    assert "each task's own cap" in shown(comparison(max_new_tokens=None), tmp_path)


def test_tasks_and_speed_get_columns_where_they_are(tmp_path: Path) -> None:
    timed = row(over_plain=SPREAD, over_lossless=SPREAD)
    (shown_table,) = tables(shown(comparison(timed, row("lossless"), row(task="mmlu")), tmp_path))
    assert column(shown_table, "task") == ["gsm8k", "gsm8k", "mmlu"]
    assert column(shown_table, "over lossless") == ["1.50x (1.00-2.00)", "", ""]
    (shown_table,) = tables(shown(comparison(row(over_plain=SPREAD)), tmp_path))  # lossless decoding was not run
    assert column(shown_table, "over plain") == ["1.50x (1.00-2.00)"]


def test_speed_alone_is_of_whole_calls_and_of_decoding(tmp_path: Path) -> None:
    result = comparison(row("lossless", over_plain=SPREAD), row("js", over_plain=SPREAD, judge_over_target=0.125))
    for each in result["summary"]:
        each.setdefault("judge_over_target", 0.0)
    result["speed"] = {
        "items": ["a", "b"],
        "repeats": 3,
        "max_new_tokens": 64,
        "arms": {
            "lossless L=5": {"tokens": {"a": 64, "b": 64}, "time": {"decode_s": 32.0, "target_forwards": 32}},
            "js L=5": {"tokens": {"a": 64, "b": 32}, "time": {"decode_s": 16.0, "target_forwards": 12}},
        },
    }
    (shown_table,) = tables(text := shown(result, tmp_path, "speed"))
    assert column(shown_table, "decoding only, over lossless") == ["1.00x", "1.50x"]
    assert column(shown_table, "tokens a forward, over lossless") == ["1.00x", "2.00x"]
    assert column(shown_table, "head and rule / target") == ["0.0%", "12.5%"]
    assert "2 prompts, 64 tokens each at batch 1, methods in turn, repeats: 3" in text
    result["summary"] = result["summary"][1:]
    (alone,) = tables(shown(result, tmp_path, "speed"))
    assert column(alone, "decoding only, over lossless") == [""]
    with pytest.raises(DataError, match="has no 'speed'"):
        shown(comparison(row()), tmp_path, "speed")


def answer(tokens: list[int], is_correct: bool | None = True) -> Result:
    return {"tokens": tokens, "score": {"correct": is_correct}}


def test_lossy_rules_are_set_against_each_other(tmp_path: Path) -> None:
    result = comparison(
        row("lossless"), row("js", tau=6.0, lossy_share=0.03), row("mars", tau=5.5, lossy_share=0.02, logprob_mean=-0.5)
    )
    right = {"js": [True, False, True, None], "mars": [True, True, False, None]}
    result["arms"] = {
        f"{rule} L=5": {"items": {str(i): answer([i], value) for i, value in enumerate(values)}}
        for rule, values in right.items()
    }
    (shown_table,) = tables(shown(result, tmp_path, "pairs"))
    assert column(shown_table, "") == ["mars L=5 less js L=5"]
    assert column(shown_table, "tau") == ["-0.50"]
    assert column(shown_table, "lossy tokens") == ["-1.00%"]
    assert column(shown_table, "log-probability") == ["-0.2500"]
    assert column(shown_table, "gained, lost") == ["1, 1"]  # what cannot be graded counts for neither
    assert column(shown_table, "accuracy, points (95%)")[0].startswith("+0.0 (-")
    with pytest.raises(DataError, match="has 1 lossy rules"):
        shown(comparison(row("lossless"), row()), tmp_path, "pairs")


def test_runs_under_other_seeds_are_set_beside_each_other(tmp_path: Path) -> None:
    names = ["js@p=0.2 L=5", "js@p=0.2@seed=1 L=5", "js@p=0.2@seed=22 L=5", "mars L=5", "fly L=5", "fly@seed=3 L=5"]
    result = comparison(*(row(name, arm=name, tau=4.0 + i, accuracy=0.5 + i / 10) for i, name in enumerate(names)))
    texts = {"a": [[1, 2, 3], [1, 2, 3], [1, 9]], "b": [[4, 5], [4, 5], [4, 5]]}
    verdicts = {"a": [True, True, False], "b": [False] * 3}
    items = [{p: answer(texts[p][run], verdicts[p][run]) for p in texts} for run in range(3)]
    result["arms"] = {name: {"items": items[i % 3]} for i, name in enumerate(names)}
    result["arms"]["fly@seed=3 L=5"] = result["arms"]["fly L=5"]
    (shown_table,) = tables(shown(result, tmp_path, "seeds"))
    assert column(shown_table, "rule") == ["js@p=0.2 L=5", "fly L=5"]  # mars ran once
    assert column(shown_table, "runs") == ["3", "2"]
    assert column(shown_table, "tau") == ["5.00 (4.00 to 6.00)", "8.50 (8.00 to 9.00)"]
    assert column(shown_table, "accuracy") == ["60% (50% to 70%)", "95% (90% to 100%)"]
    assert column(shown_table, "prompts with one text in all runs") == ["1 of 2", "2 of 2"]
    assert column(shown_table, "first difference, token") == ["1", ""]
    assert column(shown_table, "solved in some runs, not in all") == ["1", "0"]
    with pytest.raises(DataError, match="no method under more than one seed"):
        shown(comparison(row()), tmp_path, "seeds")


@pytest.mark.parametrize("form", ["", "pareto"])
def test_old_files_show_nothing_against_plain_decoding_or_another_length(tmp_path: Path, form: str) -> None:
    """Older versions set texts against plain decoding, and speed against lossless decoding at any length."""
    timed = row(over_plain=SPREAD, over_lossless=SPREAD)
    (alone,) = tables(shown(comparison(timed, row("plain", 0)), tmp_path, form))
    assert column(alone, "less lossless (95%)") == column(alone, "p") == ["", ""]
    assert "over lossless" not in alone[0] or column(alone, "over lossless") == ["", ""]
    (other,) = tables(shown(comparison(timed, row("lossless", 9)), tmp_path, form))
    assert "-12.5 (-25.0 to +6.2)" in column(other, "less lossless (95%)")
    assert "over lossless" not in other[0] or column(other, "over lossless") == ["", ""]


def test_the_trade_is_sorted_by_tau_and_its_front_is_bold(tmp_path: Path) -> None:
    rows = [row("lossless", tau=4.0, **UNGRADED), row("typical", tau=6.0, pareto=True), row(tau=5.0)]
    text = shown(comparison(*rows), tmp_path, "pareto")
    (shown_table,) = tables(text)
    assert column(shown_table, "rule") == ["**typical L=5**", "dropmatch L=5", "lossless L=5"]
    assert column(shown_table, "log-probability, less lossless") == ["-0.062", "-0.062", ""]
    pooled = [row(task="all", tau=3.0), row(task="gsm8k"), row(task="mmlu")]
    (shown_table,) = tables(text := shown(comparison(*pooled), tmp_path, "pareto"))
    assert column(shown_table, "tau") == ["3.00 (5.25-5.75)"]
    assert "2 prompts of gsm8k, mmlu; bold" in text
    pooled[0]["graded"] = pooled[1]["graded"] = 1
    assert "2 prompts of gsm8k, mmlu, 1 of them graded; bold" in shown(comparison(*pooled), tmp_path, "pareto")


def test_table_6_sets_files_side_by_side_above_the_papers_pairs(tmp_path: Path) -> None:
    one = comparison(row("lossless", 10, tau=7.5), row("dropmatch", 10, tau=8.5), row("typical", 10))
    other = comparison(
        *(row("lossless", 10, "all"), row("lossless", 10, "mmlu", n=9, accuracy=0.75)),
        *(row("dropmatch", 10, "mmlu", n=9, **UNGRADED), row("dropmatch", 10, "mbpp")),
    )
    other["provenance"] = {**PROVENANCE, "command": "another command"}
    other["settings"]["k"] = 3
    for name, result in (("a.json", one), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(result))
    block = "<!-- results:begin a.json b.json paper-6 -->\n<!-- results:end -->\n"
    text = render(block, tmp_path)
    assert render(text, tmp_path) == text
    (shown_table,) = tables(text)
    llama, qwen = published.COMPARISON
    assert [cells[0] for cells in shown_table[1:]] == [
        *("lossless L=10", "dropmatch L=10"),
        *(f"paper, {pair}: {name} L=10" for pair in (llama, qwen) for name in ("lossless", "DropMatch")),
    ]
    assert column(shown_table, "gsm8k (n=16): tau") == [
        *("7.50 (5.25-5.75)", "8.50 (5.25-5.75)"),
        *(
            f"{published.COMPARISON[pair][is_lossy, 10]['gsm8k'][1]:.2f}"
            for pair in (llama, qwen)
            for is_lossy in (False, True)
        ),
    ]
    assert column(shown_table, "gsm8k: accuracy")[:2] == [
        "50.0 (25.0 to 75.0)",
        "50.0 (25.0 to 75.0) [-12.5 (-25.0 to +6.2)]",
    ]
    assert column(shown_table, "mmlu (n=9): tau")[1] == "5.50 (5.25-5.75)"
    assert column(shown_table, "mmlu: accuracy")[:4] == ["75.0 (25.0 to 75.0)", "", "86.1", "85.3"]
    assert column(shown_table, "mbpp: accuracy")[1] == "50.0 (25.0 to 75.0)"  # no lossless row to set it against
    assert column(shown_table, "mbpp: accuracy")[2:] == [""] * 4  # not in the paper
    assert "`a.json`: Pair: `big` with `small`, bfloat16, K=5" in text
    assert "`b.json`: Pair: `big` with `small`, bfloat16, K=3" in text
    assert "From `a.json`, made by\n`dropmatch do --it d/e`.\nFrom `b.json`, made by\n`another command`." in text
    assert "over lossless" not in text


def test_table_6_has_speed_at_the_same_length(tmp_path: Path) -> None:
    rows = [row(rule, 10, over_lossless=SPREAD) for rule in ("lossless", "dropmatch")]
    rows.append(row("dropmatch", 4, over_lossless=SPREAD))  # measured against lossless at 10
    (shown_table,) = tables(shown(comparison(*rows), tmp_path, "paper-6"))
    assert column(shown_table, "gsm8k: over lossless") == [
        *("", "1.50x (1.00-2.00)", "1.50x (1.00-2.00)"),
        *("1.00x", f"{1.22 / 1.02:.2f}x", "1.00x", f"{1.13 / 0.96:.2f}x"),
    ]


def test_table_6_refuses_rows_that_were_not_measured_side_by_side(tmp_path: Path) -> None:
    """Rows of one task stood under one n, whatever theirs was, beside a lossless row that they were not set against."""

    def joined(*parts: list[Result]) -> str:
        for name, rows in zip("ab", parts, strict=True):
            (tmp_path / f"{name}.json").write_text(json.dumps(comparison(*rows)))
        return table([(tmp_path / f"{name}.json", f"{name}.json") for name in "ab"], "paper-6")

    with pytest.raises(DataError, match=r"a\.json has gsm8k with 16 prompts, and b\.json with 2"):
        joined([row("lossless")], [row(length=10, n=2)])
    with pytest.raises(DataError, match=r"b\.json has dropmatch L=5 on gsm8k.*another run, a\.json.* -o a\.json"):
        joined([row("lossless")], [row()])
    with pytest.raises(DataError, match=r"b\.json has dropmatch L=10 on gsm8k.*another run, a\.json"):
        joined([row("lossless")], [row(length=10)])
    fives, tens = ([row(rule, length) for rule in ("lossless", "dropmatch")] for length in (5, 10))
    assert "gsm8k (n=16): tau" in joined(fives, tens)


def test_table_6_refuses_a_task_twice_and_files_of_other_rules(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(comparison()))
    with pytest.raises(DataError, match="has gsm8k too"):
        table([(tmp_path / "a.json", "a.json"), (tmp_path / "a.json", "a.json")], "paper-6")
    with pytest.raises(DataError, match="neither lossless nor dropmatch"):
        shown(comparison(row("typical")), tmp_path, "paper-6")


# -- single heads ---------------------------------------------------------------------------------------------------


@pytest.fixture
def heads(tmp_path: Path) -> Result:
    """What analyze heads writes of two prompts: the target is right in both, the first head of both rates in one."""
    path = tmp_path / "gsm8k.jsonl"
    line = {"task": "gsm8k", "prompt": "how fast", "answer": "7", "meta": {}}
    path.write_text("".join(json.dumps({**line, "id": f"gsm8k/{i}"}) + "\n" for i in range(2)))
    items = load_items(path)
    arms = ["target", "draft", *(f"head {i} p={p}" for p in ("0.1", "0.5") for i in range(1, 6))]
    wrong = {("head 1 p=0.1", "gsm8k/0"), ("head 1 p=0.5", "gsm8k/1"), ("draft", "gsm8k/0"), ("draft", "gsm8k/1")}
    texts = {
        (arm, item.id): {"text": "3", "tokens": [1]} if (arm, item.id) in wrong else {"text": "7", "tokens": [2]}
        for arm in arms
        for item in items
    }
    names = ("positions", "centroid_prob", "target_prob", "is_target_token")
    sizes = [
        dict(zip(names, values, strict=True)) for values in [(0, 0, 0, 0)] * 3 + [(2, 1, 1.5, 1), (6, 5.4, 4.8, 6)]
    ]
    judged = [["js", 0.02, 0.03], ["js", 0.04, 0.05], ["rejected", 0.5, 0.25]]
    return {
        "kind": "analyze-heads",
        "settings": {**SETTINGS, "data": ["gsm8k.jsonl"], "draft_weights": "int4"},
        "accuracy": heads_analysis.accuracy_rows(items, arms, texts),
        "votes": heads_analysis.vote_rows([{"sizes": sizes}], 5),
        "divergence": heads_analysis.divergence_rows([{"judged": judged}]),
        "provenance": PROVENANCE,
    }


def test_heads_alone_stand_beside_the_papers(heads: Result, tmp_path: Path) -> None:
    text = shown(heads, tmp_path, "paper-1")
    (shown_table,) = tables(text)
    assert [cells[0] for cells in shown_table[1:]] == [
        *("target, no dropout", "draft model alone", "p_drop=0.1", "p_drop=0.5"),
    ]
    right = heads["accuracy"][0]
    assert right["accuracy"] == 1.0
    interval = f"({100 * right['accuracy_low']:.1f} to 100.0)"
    assert column(shown_table, "mean") == [f"100.0 {interval}", column(shown_table, "mean")[1], "90.0", "90.0"]
    assert column(shown_table, "mean")[1].startswith("0.0 (0.0 to ")
    assert column(shown_table, "head 1")[2].startswith("50.0 (")
    assert column(shown_table, "head 5")[2] == f"100.0 {interval}"
    assert column(shown_table, "text of the target") == ["100%", "0%", "90%", "90%"]
    assert column(shown_table, "paper: mean") == ["81.7", "72.6", "80.9", "70.4"]
    assert column(shown_table, "heads 1 to 5")[3] == "78.7, 65.2, 73.8, 64.0, 70.1"
    assert "head 1 p=0.1, -50.0 (" in text
    assert "one test of 10" in text
    assert "2 prompts of gsm8k.jsonl, at most 8 tokens each, K=5, draft_weights=int4" in text


def test_votes_stand_beside_the_papers(heads: Result, tmp_path: Path) -> None:
    (shown_table,) = tables(shown(heads, tmp_path, "paper-2"))
    assert shown_table[1] == ["1 of 5", "0", "0.00%", "", "", "", "0.00%", "0.255"]
    assert shown_table[4] == ["4 of 5", "2", "25.00%", "0.500", "0.750", "50.0%", "0.54%", "0.517"]
    assert shown_table[5] == ["5 of 5", "6", "75.00%", "0.900", "0.800", "100.0%", "98.40%", "0.939"]
    heads["settings"]["k"] = 4  # the paper's five heads are then no match
    (shown_table,) = tables(shown(heads, tmp_path, "paper-2"))
    assert column(shown_table, "paper: share") == [""] * 5


def test_divergences_stand_beside_the_papers(heads: Result, tmp_path: Path) -> None:
    (shown_table,) = tables(shown(heads, tmp_path, "paper-3"))
    assert shown_table[1:] == [
        ["kept by Eq. 6", "2", "66.7%", "0.0300", "0.0300", "0.0400", "0.0400", "0.0254", "0.0313"],
        ["kept by Eq. 7", "0", "0.0%", "", "", "", "", "0.0097", "0.0014"],
        ["rejected", "1", "33.3%", "0.5000", "0.5000", "0.2500", "0.2500", "", ""],
    ]


def test_parts_that_were_not_measured_are_left_out_or_named(heads: Result, tmp_path: Path) -> None:
    assert len(tables(shown(heads, tmp_path))) == 3
    del heads["accuracy"], heads["divergence"]
    assert len(tables(shown(heads, tmp_path))) == 1
    with pytest.raises(DataError, match="has no 'accuracy'"):
        shown(heads, tmp_path, "paper-1")
    del heads["votes"]
    with pytest.raises(DataError, match="none of accuracy, votes, divergence"):
        shown(heads, tmp_path)


@pytest.mark.parametrize("with_entailment", [True, False])
def test_similarity_is_a_matrix_a_rate(tmp_path: Path, with_entailment: bool) -> None:
    entailment = {
        "entailment": [[1.0, 0.5], [0.5, 1.0]],
        "entailment_between_heads": 0.5,
        "entailment_to_target": [0.25, 0.75],
    }
    cosine = {
        "cosine": [[1.0, 0.875], [0.875, 1.0]],
        "cosine_between_heads": 0.875,
        "cosine_to_target": [0.9375, 0.8125],
    }
    rows = [
        {"p_drop": p, "same_text": 0.5, **cosine, **(entailment if with_entailment else dict.fromkeys(entailment))}
        for p in (0.1, 0.3)
    ]
    settings: Result = {**SETTINGS, "k": 2, "encoder": "mini", "nli": "pairs" if with_entailment else None}
    settings |= {"encoder_max_tokens": 64, "texts_cut": 3, "pairs_cut": 1 if with_entailment else None}
    result: Result = {
        "kind": "analyze-similarity",
        "settings": settings,
        "similarity": rows,
        "answers": {},
        "provenance": PROVENANCE,
    }
    text = shown(result, tmp_path)
    first, second = tables(text)
    assert (first[0][0], second[0][0]) == ("p_drop=0.1", "p_drop=0.3")
    assert first[1] == (
        ["head 1", "1.000 / 1.000", "0.875 / 0.500"] if with_entailment else ["head 1", "1.000", "0.875"]
    )
    assert first[3][1] == ("0.938 / 0.250" if with_entailment else "0.938")
    assert "3 texts were cut to the encoder's 64 tokens" in text
    assert ("entail" in text) == with_entailment
    assert ("compare: `mini`, `pairs`;" if with_entailment else "compare: `mini`;") in text
    assert "tokens to 50.0% of the prompts" in text


# -- time -----------------------------------------------------------------------------------------------------------


def test_overhead_shows_shares_of_a_forward_beside_the_papers(tmp_path: Path) -> None:
    ms = {BODY: 9.0, PLAIN: 1.0, "lossless": 0.5, "heads, naive (Eq. 4)": 1.5, "heads with JS (Eq. 6, 7)": 2.5}
    result: Result = {
        "kind": "analyze-overhead",
        "settings": {
            **SETTINGS,
            "inputs": 5,
            "context": 256,
            "repeats": 3,
            "shortlist_size": 1024,
            "vocabulary": 2000,
            "hidden_size": 32,
            "skipped": ["closed form of Eq. 4: no rows."],
        },
        "rows": overhead_rows({name: [value / 1000] * 3 for name, value in ms.items()}),
        "seconds": {},
        "provenance": PROVENANCE,
    }
    text = shown(result, tmp_path)
    (shown_table,) = tables(text)
    assert column(shown_table, "ms") == ["10.000", "9.000", "1.000", "0.500", "1.500", "2.500"]
    assert shown_table[5][-5:] == ["15.00%", "+1.000", "+10.00", "0.17", "0.17%"]
    assert column(shown_table, "paper: ms") == ["107.00", "", "0.05", "", "0.17", "1.74"]
    assert "Left out: closed form of Eq. 4: no rows. Paper" in text
    assert "5 tokens behind 256 cached ones" in text


@pytest.mark.parametrize("peak", [3 * 2**30, None])
def test_batches_stand_beside_the_papers(tmp_path: Path, peak: int | None) -> None:
    runs = [
        {
            "batch": batch,
            "repeat": 0,
            "wave": 0,
            "arm": arm,
            "emitted": 12,
            "rounds": 4,
            "peak_bytes": peak,
            "seconds": seconds,
            "decode_s": seconds / 2,
            "target_s": 1.0,
            "judge_s": 0.125,
            "accepted": 8,
            "lossy_tokens": 3,
        }
        for batch in (4, 5)
        for arm, seconds in (("lossless", 3.0), ("dropmatch", 2.0))
    ]
    result: Result = {
        "kind": "bench-batch",
        "settings": {**SETTINGS, "rule": "dropmatch", "repeats": 1, "batches": [4, 5], "out_of_memory_at": 8},
        "summary": batch_rows(runs, "dropmatch"),
        "runs": runs,
        "provenance": PROVENANCE,
    }
    text = shown(result, tmp_path)
    (shown_table,) = tables(text)
    memory = "" if peak is None else "3.00, 3.00"
    ratio = "1.50x (1.50-1.50)"
    assert shown_table[1] == ["4", "1", ratio, ratio, "3.00, 3.00", "4.0, 6.0", "12.5%", "25.0%", memory, "1.18x"]
    assert shown_table[2][-1] == ""  # the paper has no batch of 5
    assert "A batch of 8 did not fit" in text
    del result["settings"]["out_of_memory_at"]
    assert "did not fit" not in shown(result, tmp_path)


def test_a_gpu_is_named_in_the_place_of_the_processor(tmp_path: Path) -> None:
    text = shown({**QUICK, "provenance": {**PROVENANCE, "device": "A GPU"}}, tmp_path)
    assert "A GPU, torch 2.13.0" in text
    assert "threads" not in text


def test_a_shortlist_is_set_beside_all_tokens(tmp_path: Path) -> None:
    summary: Result = {"positions": 86, "same_tokens": 0.94, "same_majority": 0.98, "same_js": 1.0}
    summary |= {"median_radius_error": 0.0003, "full_ms_median": 47.2, "shortlist_ms_median": 5.1}
    settings: Result = {**SETTINGS, "shortlist_size": 1024}
    result: Result = {"kind": "bench-heads", "settings": settings, "summary": {**summary, "target_ms_mean": 290.0}}
    (shown_table,) = tables(shown({**result, "provenance": PROVENANCE}, tmp_path))
    assert shown_table[1] == ["86", "100.0%", "98.0%", "94.0%", "0.03%", "", "47.2", "5.1", "290.0"]
    result["summary"] |= {"worst_rank": 12}
    (shown_table,) = tables(shown({**result, "provenance": PROVENANCE}, tmp_path))
    assert shown_table[1][5] == "12"


# -- radius and closed form -----------------------------------------------------------------------------------------


def test_the_radius_shows_both_kinds_and_what_auto_picks(tmp_path: Path) -> None:
    sampled, expected = figures(torch.full((9,), 0.25)), figures(torch.full((9,), 0.125))
    choice = {"p_drop": 0.05, "why": "the largest that fits", "median_radius": {"0.05": 0.04}}
    settings: Result = {**SETTINGS, "positions": 9, "hidden_size": 32, "items": None, "draft": None}
    rows: list[Result] = [{"p_drop": 0.3, "sampled": sampled, "expected": expected}]
    rows[0]["expected_over_sampled"] = {"q10": 0.4, "q50": 0.5, "q90": 0.6}
    auto: Result = {"target_radius": 0.05, "sampled": choice, "expected": {**choice, "p_drop": 0.03}}
    result: Result = {
        "kind": "analyze-radius",
        "settings": settings,
        "radius": rows,
        "auto": auto,
        "provenance": PROVENANCE,
    }
    text = shown(result, tmp_path)
    (shown_table,) = tables(text)
    assert shown_table[1] == ["0.3", *["0.2500"] * 4, "0%", "0.1250", "0.50 (0.40-0.60)"]
    assert '`p_drop="auto"` picks 0.05: the largest that fits.' in text
    assert '`p_drop="auto-expected"` picks 0.03' in text
    assert "9 positions of the built-in text" in text
    rows[0] = {"p_drop": 0.3, "sampled": sampled, "expected": None}  # a head that shows no rows
    auto["expected"] = None
    settings["items"] = ["a"]
    text = shown(result, tmp_path)
    assert tables(text)[0][1][-2:] == ["", ""]
    assert "auto-expected" not in text
    assert "positions of 1 prompts" in text


def test_the_closed_form_is_set_beside_sampling(tmp_path: Path) -> None:
    shares = {"closed_with_one_sampling": 0.9, "two_samplings": 0.8, "best_fixed_with_one_sampling": 0.95}
    entry: Result = {
        "draft": "the target with 12 tokens of context",
        "judged": 40,
        "num_paths": 5,
        "samplings": 30,
        "by_p_drop": {
            "0.3": {
                "chance": {"mean_error": 0.02, "mean_error_of_sampling": 0.01, "correlation": 0.5},
                "radius": {"median_sampled": 0.6, "ratio_median": 0.5, "ratio_p10": 0.25, "ratio_p90": 0.75},
                "head": shares,
                "js": shares,
            }
        },
        "provenance": {"command": "python -m one"},
    }
    other = {**entry, "draft": "small", "provenance": {"command": "python -m other"}}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"kind": "closed-form-agreement", "models": {"a": entry, "b": other}}))
    text = table([(path, "r.json")])
    (shown_table,) = tables(text)
    assert shown_table[1] == [
        *("a (40)", "itself", "0.3", "0.020 (0.010)", "0.50"),
        *["0.90 / 0.80 / 0.95"] * 2,
        *("0.60", "0.50, 0.25-0.75"),
    ]
    assert shown_table[2][:2] == ["b (40)", "small"]
    assert "```\npython -m one\npython -m other\n```" in text


# -- judges and trees -----------------------------------------------------------------------------------------------

JUDGED = ("judged_share", "metrics", "tokens_per_second", "quantile", "threshold", "p_drop")


@pytest.fixture
def autojudge() -> Result:
    """What bench autojudge writes of GSM8K and IFEval, with two thresholds and DropMatch at two drop probabilities."""
    settings = AutoJudgeSettings(window=32, thresholds=("q0.2", "0.6"), p_drops=(0.2, 0.3), base_lengths=(8,))

    def one(method: str, tau: float, length: int = 32, **others: Any) -> Result:
        return {
            **row(method, length),
            "method": method,
            **dict.fromkeys(JUDGED),
            "judged_share": 0.0,
            "tau": tau,
            **others,
        }

    low: Result = {"quantile": "q0.2", "threshold": 0.125}
    high: Result = {"quantile": None, "threshold": 0.6}
    rows = [
        one("lossless", 3.0, 8, tokens_per_second=66.0),
        one("lossless", 4.0),
        one("dropmatch", 5.0, p_drop=0.2),
        one("dropmatch", 6.0, p_drop=0.3),
        one("judge", 7.0, judged_share=0.25, **low),
        one("judge", 9.0, **high),
        one("dropmatch+judge", 8.0, p_drop=0.2, **low),
        one("dropmatch+judge", 10.0, p_drop=0.2, **high),
        one("dropmatch+judge", 11.0, p_drop=0.3, **low),
        one("dropmatch+judge", 12.0, p_drop=0.3, **high),
    ]
    judge = {"name": "mine", "features": "DT", "auc": 0.75, "in_distribution": True}
    part = {"file": "gsm8k.json", "judge": judge, "timed_items": 3, "repeats": 2}
    far = {**part, "judge": {**judge, "auc": None, "in_distribution": False}, "timed_items": 0, "repeats": 0}
    return {
        "kind": "bench-autojudge",
        "settings": {**SETTINGS, "window": 32},
        "parts": {"gsm8k": part, "ifeval": far},
        "rows": {"gsm8k": rows, "ifeval": rows},
        "table8": threshold_table(rows, settings),
        "table9": [],
        "figure5": curves(rows),
        "figure6": curves(rows),
        "provenance": PROVENANCE,
    }


def test_thresholds_stand_above_the_papers(autojudge: Result, tmp_path: Path) -> None:
    text = shown(autojudge, tmp_path, "paper-8")
    (shown_table,) = tables(text)
    assert column(shown_table, "threshold") == [
        *("none, L=8", "none, L=32", "0.12 (q0.2)", "0.6", "paper: none, L=8", "paper: none, L=32"),
        *(f"paper: {threshold}" for threshold in ("0.014", "0.022", "0.112", "0.281")),
    ]
    interval = "(5.25-5.75)"
    assert column(shown_table, "judge: tau")[:4] == [f"{tau} {interval}" for tau in ("3.00", "4.00", "7.00", "9.00")]
    assert column(shown_table, "with DropMatch p=0.2: tau")[:4] == [
        "",
        *(f"{tau} {interval}" for tau in ("5.00", "8.00", "10.00")),
    ]
    assert column(shown_table, "with DropMatch p=0.3: tau")[1:4] == [
        f"{t} {interval}" for t in ("6.00", "11.00", "12.00")
    ]
    assert column(shown_table, "judge: tokens/s")[:6] == ["66.0", "", "", "", "66.6", "45.5"]
    assert column(shown_table, "kept by the judge alone")[2:4] == ["25.0%", "0.0%"]
    assert column(shown_table, "with DropMatch p=0.3: accuracy")[-1] == "90.7"
    assert column(shown_table, "with DropMatch p=0.2: accuracy")[-1] == ""  # the paper's is of 0.3
    assert "16 prompts of gsm8k, 3 of them timed 2 times at batch 1" in text
    assert "`mine` (DT, validation AUC 0.75) is asked about prompts of the kind it learned from" in text


def test_curves_run_by_tau(autojudge: Result, tmp_path: Path) -> None:
    text = shown(autojudge, tmp_path, "figure-6")
    (shown_table,) = tables(text)
    assert list(dict.fromkeys(column(shown_table, "method"))) == [
        *("lossless", "dropmatch p=0.2", "dropmatch p=0.3", "judge", "dropmatch+judge p=0.2", "dropmatch+judge p=0.3"),
    ]
    assert column(shown_table, "threshold")[-2:] == ["0.12 (q0.2)", "0.6"]
    assert column(shown_table, "tau")[-1] == "12.00 (5.25-5.75)"
    assert "a kind it never saw" in text
    assert "timed" not in text
    assert "n=16" in text


def test_evaluation_sets_that_were_not_run_are_left_out_or_named(autojudge: Result, tmp_path: Path) -> None:
    assert len(tables(shown(autojudge, tmp_path))) == 3
    with pytest.raises(DataError, match="has no table9"):
        shown(autojudge, tmp_path, "paper-9")
    autojudge["table9"], autojudge["rows"]["mbpp"] = autojudge["table8"], autojudge["rows"]["gsm8k"]
    autojudge["parts"]["mbpp"] = autojudge["parts"]["gsm8k"]
    (shown_table,) = tables(shown(autojudge, tmp_path, "paper-9"))
    assert shown_table[-1][:4] == ["paper: 0.1214", "23.98", "46.97", ""]
    for key in ("table8", "table9", "figure5", "figure6"):
        autojudge[key] = []
    with pytest.raises(DataError, match="none of table8"):
        shown(autojudge, tmp_path)


@pytest.fixture
def eagle3() -> Result:
    """What bench eagle3 writes, one depth, two drafters."""
    depths = [
        {**row(rule, 6, task, over_plain=over), "paper_depth": 5}
        for task, over in (("gsm8k", SPREAD), ("qa", None))
        for rule in ("lossless", "dropmatch-naive")
    ]
    domains = [
        {**row(rule, 6), "drafter": drafter, "domain": domain}
        for drafter, lossy in (("eagle3", "dropmatch-naive"), ("draft-model", "dropmatch"))
        for domain in ("own", "other")
        for rule in ("lossless", lossy)
    ]
    settings: Result = {
        **SETTINGS,
        "tree_tokens": 60,
        "top_k": 10,
        "lengths": [6],
        "speed_items": 1,
        "items": ["gsm8k/7", "mt_bench/1"],
    }
    return {
        "kind": "bench-eagle3",
        "settings": {**settings, "other_items": ["korean/0", "korean/1"]},
        "depths": depths,
        "chain": [row("lossless", 6, tau=2.0)],
        "domains": domains,
        "provenance": PROVENANCE,
    }


def test_trees_stand_beside_the_papers(eagle3: Result, tmp_path: Path) -> None:
    text = shown(eagle3, tmp_path, "paper-7")
    (shown_table,) = tables(text)
    assert shown_table[2] == [
        *("gsm8k", "EAGLE-3, `dropmatch-naive`", "5", "16", "1.50x (1.00-2.00)", "5.50 (5.25-5.75)"),
        *("50.0 (25.0 to 75.0)", "-12.5 (-25.0 to +6.2)", "2.5%", "4.32x", "6.09", "78.75"),
    ]
    assert shown_table[1][-3:] == ["4.19x", "5.82", "78.75"]
    assert shown_table[3][-3:] == ["", "", ""]  # not in the paper
    assert "Chains of 6 levels in the place of trees: tau `lossless` 2.00 (5.25-5.75)." in text
    del eagle3["chain"]
    assert "Chains" not in shown(eagle3, tmp_path, "paper-7")


def test_drafters_far_from_their_text_stand_beside_the_papers(eagle3: Result, tmp_path: Path) -> None:
    text = shown(eagle3, tmp_path, "paper-10")
    (shown_table,) = tables(text)
    assert column(shown_table, "drafter") == ["EAGLE-3"] * 4 + ["draft model"] * 4
    assert column(shown_table, "paper: tau") == ["", "", "1.46", "", "", "", "4.85", "5.24"]
    assert column(shown_table, "score") == ["", "", "7.96", "", "", "", "8.08", "8.12"]
    assert "Own prompts: gsm8k, mt_bench; other: korean." in text
    assert len(tables(shown(eagle3, tmp_path))) == 2


def test_vllm_arms_are_set_against_stock(tmp_path: Path) -> None:
    arm: Result = {
        "arm": "stock",
        "n": 2,
        "tau": None,
        "tokens": 40,
        "tokens_per_second": 20.0,
        "over_stock": 1.0,
        "cut_off": 0,
    }
    arm |= dict.fromkeys(("lossy_tokens", "accuracy", "accuracy_low", "accuracy_high", "gained", "lost", "p_value"))
    lossy = {**arm, "arm": "dropmatch", "tau": 4.5, "over_stock": 1.25, "lossy_tokens": 3.0, "gained": 1, "lost": 2}
    lossy |= {"accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75, "p_value": 1.0}
    settings: Result = {
        "target": "big",
        "speculative": {"model": "small", "num_speculative_tokens": 5},
        "dropmatch": [{"k": 5}, {"rule": "head"}],
    }
    settings |= {"engine": {"dtype": "bfloat16"}, "max_new_tokens": 8, "repeats": 3, "items": ["a", "b"]}
    result: Result = {"kind": "vllm", "settings": settings, "summary": [arm, lossy]}
    text = shown({**result, "provenance": {**PROVENANCE, "vllm": "0.32"}}, tmp_path)
    (shown_table,) = tables(text)
    assert shown_table[1:] == [
        ["stock", "", "20.0", "1.00x", "", "", "", "0", ""],
        ["dropmatch", "4.50", "20.0", "1.25x", "50.0 (25.0 to 75.0)", "1, 2", "1", "0", "3 of 40"],
    ]
    assert (
        "`big` with `small`, 5 drafted tokens a round, dtype=bfloat16; DropMatch with k=5; rule=head; vLLM 0.32" in text
    )
