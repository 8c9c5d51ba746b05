"""Documents hold the tables that their results files give, and nothing typed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dropmatch.bench.tables import _compare, main, render, table
from dropmatch.errors import DataError

ROOT = Path(__file__).parents[2]
SPREAD = {"median": 1.5, "min": 1.0, "max": 2.0}
RESULT = {
    "kind": "bench-quick",
    "settings": {
        "target": "default",
        "draft": None,
        "max_new_tokens": 8,
        "k": 5,
        "p_drop": 0.3,
        "heads": "shortlist",
        "dtype": "torch.bfloat16",
        "items": ["a", "b"],
    },
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
    "provenance": {
        "cpu": "A CPU",
        "num_threads": 2,
        "torch": "2.13.0",
        "command": "dropmatch bench quick --data d/e",
    },
}


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_tables_in_the_documents_are_those_of_the_results_files(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "results:begin results/" in text
    assert render(text, ROOT) == text


def test_a_table_is_written_between_its_marks_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    document = tmp_path / "d.md"
    document.write_text("before\n<!-- results:begin r.json -->\nold\n<!-- results:end -->\nafter\n")
    monkeypatch.chdir(tmp_path)
    main([str(document)])
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| dropmatch L=5 | 1.50x (1.00-2.00) | 1.50x (1.00-2.00) | 1.25x | 4.25 | 12.5% | 3 of 16 |" in text
    assert "heads=shortlist" in text
    assert "`dropmatch bench quick --data d/e`" in text
    main([str(document)])
    assert document.read_text() == text


def test_a_comparison_shows_what_rules_cost() -> None:
    figures = {
        "rule": "dropmatch",
        "arm": "dropmatch L=5",
        "task": "gsm8k",
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
        "length_ratio": 1.5,
        "repetition": 0.0625,
        "diverged_share": 0.75,
        "over_plain": None,
        "over_lossless": None,
        "pareto": True,
    }
    ungraded = {**figures, "arm": "lossless L=5", "pareto": False, "lossy_prob_mean": None}
    ungraded |= dict.fromkeys(("accuracy", "accuracy_difference", "p_value"))
    result = {
        "kind": "compare",
        "settings": {**RESULT["settings"], "temperature": 0.0},
        "summary": [figures, ungraded],
        "provenance": {"torch": "2", "command": "dropmatch compare"},
    }
    lines = _compare(result, "r.json").splitlines()
    assert lines[2] == (
        "| dropmatch L=5 * | 5.50 (5.25-5.75) | 50.0 (25.0 to 75.0) | -12.5 (-25.0 to +6.2) | 0.031 | 2.50% | 0.20 | "
        "-0.250 | 1.500 | 6.2% | 75% |"
    )
    assert lines[3].startswith("| lossless L=5 | 5.50 (5.25-5.75) |  |  |  | 2.50% |  |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[1:4])


def test_missing_broken_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(DataError, match="does not exist"):
        table(path, "r.json")
    path.write_text('{"kind":\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        table(path, "r.json")
    path.write_text('{"kind": "other"}')
    with pytest.raises(DataError, match=r"holds 'other'.*bench-quick, compare"):
        table(path, "r.json")
