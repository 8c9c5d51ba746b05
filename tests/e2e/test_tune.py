"""`dropmatch tune` on a tiny pair: search, evidence, choice, and a command line that runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import tiny
from commands import Command
from dropmatch.bench.journal import Journal
from dropmatch.bench.tables import table
from dropmatch.bench.tune import TuneSettings, candidates, choose, command_line, survivors
from dropmatch.bench.verdict import verdict
from dropmatch.errors import ConfigError, UnknownNameError
from tabled import column, tables

MADE = {"target": "T", "draft": None}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [{"id": f"p/{i}", "task": "prompts", "prompt": f"how fast is boat {i}", "meta": {}} for i in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def tune(command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path) -> Command:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        models = ("--data", data, "--target", pair.target, "--draft", pair.draft)
        small = ("--lengths", "2,4", "--p-drops", "0.05,0.3", "--guards", "0,0.2", "-n", "16", "--cost-tokens", "8")
        few = ("--cost-items", "1", "--finalists", "2", "--output", tmp_path / "tune.json")
        return command("tune", *models, *small, *few, *arguments)

    return run


def _result(tmp_path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"), parse_constant=refuse)


def test_tune_shows_its_evidence_and_recommends_a_command_that_runs(
    tune: Command, command: Command, tmp_path: Path
) -> None:
    code, out, err = tune("--max-lossy-share", "0.5")
    assert code == 0, err
    result = _result(tmp_path)
    assert [(rung["items"], len(rung["rows"])) for rung in result["screening"]] == [(2, 8), (3, 4)]
    assert len(result["screening"][-1]["kept"]) == 2
    rules = [row["rule"] for row in result["finals"]]
    assert (rules[0], rules[-1], len(rules)) == ("lossless", "plain", 4)
    assert set(rules[1:-1]) == set(result["screening"][-1]["kept"])
    for row in result["finals"][1:-1]:
        (check,) = row["checks"]
        assert (check["measure"], check["num_items"]) == ("lossy share", 6)  # the prompts that screening did not see
        assert check["value"] <= check["worst"]
    costs = result["costs"]
    assert costs["lossless_round_ms"].keys() == {"2", "4"}
    assert costs["judge_ms"].keys() == {"sampled k=5", "expected k=5"}
    (finals,), (screening,) = (
        tables(table([(tmp_path / "tune.json", "tune.json")], form)) for form in ("", "screening")
    )
    assert [cell.strip("*") for cell in column(finals, "")] == [
        row["arm"] for row in sorted(result["finals"], key=lambda row: -row["predicted_tokens_per_second"])
    ]
    assert len(screening) == 1 + 8 + 4
    assert sum(cell.startswith("**") for cell in column(screening, "rule")) == 4 + 2
    choice = result["recommendation"]
    fastest = max(
        (row for row in result["finals"] if row["status"] != "broken"),
        key=lambda row: row["predicted_tokens_per_second"],
    )
    assert choice["arm"] == fastest["arm"]
    assert choice["timing"]["over_plain"]["median"] > 0
    assert out.splitlines()[-1] == choice["command"]
    assert f"Recommended: {choice['arm']}" in out
    program, *words = shlex.split(choice["command"])
    assert program == "dropmatch"
    code, text, _ = command(*words, "-n", "4")
    assert code == 0
    assert text.strip()
    assert not list(tmp_path.glob("*.journal"))


def test_a_stopped_search_goes_on_where_it_was(tune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, count, kept = Journal.add, 0, []

    def stop_at(journal: Journal, entry: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count in (4, 20, 40):  # in the costs, in screening, in the finals
            raise KeyboardInterrupt
        kept.append(json.dumps([entry.get(key) for key in ("arm", "item", "cost", "timing")], sort_keys=True))
        add(journal, entry)

    monkeypatch.setattr(Journal, "add", stop_at)
    single = ("--guards", "0", "--max-logprob-loss", "5")
    for _ in range(3):
        code, _, err = tune(*single)
        assert code == 130
        assert "Give the same command again" in err
        assert not (tmp_path / "tune.json").exists()
    code, _, err = tune(*single, "--seed", "1")
    assert (code, "other settings" in err) == (2, True)
    assert tune(*single)[0] == 0
    assert len(set(kept)) == len(kept)  # nothing was measured twice
    assert [check["measure"] for check in _result(tmp_path)["finals"][1]["checks"]] == ["log-prob loss"]


def test_a_search_of_other_weights_or_with_damaged_timings_is_refused(
    tune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of a model trained further were taken over, and a damaged line was an error of Python."""
    with monkeypatch.context() as stopped:
        stopped.setattr("dropmatch.bench.tune._Search.screen", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert tune()[0] == 130
    journal = tmp_path / "tune.json.journal"
    whole = journal.read_text(encoding="utf-8")
    with monkeypatch.context() as trained:
        trained.setattr("dropmatch.bench.tune.weights_of", lambda _: {"target_digest": "other", "draft_digest": None})
        code, _, err = tune()
        assert code == 2
        assert "target_digest: " in err
    journal.write_text(whole.replace('"decode_s"', '"decoded_s"', 1), encoding="utf-8")
    code, _, err = tune()
    assert code == 2
    assert "tune.json.journal, line 2: cost.decode_s is missing" in err
    journal.write_text(whole, encoding="utf-8")
    code, _, err = tune()
    assert code == 0
    assert "UTC): 0 answers, " in err


def test_an_impossible_budget_ends_in_exact_decoding(tune: Command, tmp_path: Path) -> None:
    code, out, err = tune("--max-lossy-share", "0", "--p-drops", "0.3", "--guards", "0", "--forms", "sampled")
    assert code == 0, err
    choice = _result(tmp_path)["recommendation"]
    assert choice["rule"] in ("lossless", "plain")
    assert choice["is_proven"] is True
    assert "--rule dropmatch" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--guards", "2"), "--guards='2' is not allowed"),
        (("--ks", "0"), "--ks='0' is not allowed"),
        (("--p-drops", "1.5"), "p_drop=1.5 is out of range"),
        (("--p-drops", "much"), "--p-drop='much' is not allowed"),
        (("--forms", "closed"), "Unknown form of the rule 'closed'"),
        (("--num", "5"), "5 prompts are too few"),
        (("--max-accuracy-drop", "0.02"), "None of the prompts has ground truth"),
        (("--draft", "none"), "There is no drafter to tune for"),
    ],
)
def test_bad_options_are_refused(tune: Command, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = tune(*arguments)
    assert code == 2
    assert message in err


# -- the choice itself ----------------------------------------------------------------------------------------------


def _row(rule: str, speed: float, value: float = 0.0, worst: float = 0.0, limit: float = 0.02) -> dict[str, Any]:
    is_exact = rule in ("lossless", "plain")
    status = "within" if worst <= limit else "unproven" if value <= limit else "broken"
    check = {
        "measure": "accuracy drop",
        "limit": limit,
        "value": value,
        "worst": worst,
        "confidence": 0.7,
        "num_items": 40,
        "needed": 500,
        "status": status,
    }
    return {
        "arm": f"{rule} L=8",
        "rule": rule,
        "draft_length": 0 if rule == "plain" else 8,
        "predicted_tokens_per_second": speed,
        "predicted_over_plain": speed,
        "predicted_over_lossless": speed,
        "faster_than_lossless": None if is_exact else 0.9,
        "checks": [] if is_exact else [check],
        "status": "within" if is_exact else status,
        "form": "sampled",
        "k": 5,
        "p_drop": 0.2,
        "guard": 0.05,
    }


PLAIN, LOSSLESS = _row("plain", 1.0), _row("lossless", 1.5)
PROVEN = _row("dropmatch@p=0.1", 1.6, 0.0, 0.01)
UNPROVEN = _row("dropmatch@p=0.2", 1.8, 0.01, 0.05)
BROKEN = _row("dropmatch@p=0.3", 2.5, 0.03, 0.08)


def test_a_setting_that_breaks_the_budget_is_never_chosen() -> None:
    assert choose([LOSSLESS, BROKEN, PLAIN], strict=False)["rule"] == "lossless"


def test_an_unproven_setting_is_chosen_only_with_a_word_of_warning() -> None:
    choice = choose([LOSSLESS, PROVEN, UNPROVEN, BROKEN, PLAIN], strict=False)
    assert choice["rule"] == UNPROVEN["rule"]
    assert choice["is_proven"] is False
    assert choice["proven_alternative"]["rule"] == PROVEN["rule"]
    timing = {"items": 2, "over_plain": {"median": 1.7}, "over_lossless": {"median": 1.1}}
    lines = verdict({"recommendation": {**choice, "timing": timing}, "settings": {"items": []}})
    doubt = next(line for line in lines if line.startswith("NOT PROVEN"))
    for figure in ("1.0 points", "5.0 points", "2.0 points", "70%", "About 500 prompts"):
        assert figure in doubt
    assert any(PROVEN["arm"] in line for line in lines)
    assert not any("MEASURED SLOWER" in line for line in lines)
    timing["over_plain"] = {"median": 0.9}
    lines = verdict({"recommendation": {**choice, "timing": timing}, "settings": {"items": []}})
    assert any(line.startswith("MEASURED SLOWER than plain decoding") for line in lines)


def test_strict_takes_proven_settings_only() -> None:
    choice = choose([LOSSLESS, PROVEN, UNPROVEN, PLAIN], strict=True)
    assert (choice["rule"], choice["is_proven"], choice["proven_alternative"]) == (PROVEN["rule"], True, None)
    assert choose([LOSSLESS, UNPROVEN, PLAIN], strict=True)["rule"] == "lossless"


def test_plain_decoding_is_recommended_where_drafting_does_not_pay() -> None:
    choice = choose([_row("lossless", 0.8), _row("dropmatch@p=0.1", 0.9), PLAIN], strict=False)
    assert choice["rule"] == "plain"
    assert command_line(choice, MADE) == "dropmatch generate 'YOUR PROMPT' --target T --draft none"


def test_the_mildest_candidate_survives_though_it_is_slow() -> None:
    rows = [UNPROVEN, _row("a", 1.9, 0.01, 0.1), BROKEN, _row("mild", 1.2, 0.0, 0.03)]
    assert survivors(rows, 2) == [1, 3]
    assert survivors(rows, 3) == [1, 0, 3]  # what breaks the budget goes last, however fast
    assert survivors(rows, 9) == [1, 0, 3, 2]


def test_the_command_line_holds_what_was_chosen_and_what_was_given() -> None:
    choice = {**UNPROVEN, "rule": "dropmatch@p=0.2@k=5", "form": "full"}
    described = {"target": "my model", "draft": "D", "draft_weights": "int4", "min_confidence": 0.4, "dtype": "float32"}
    assert command_line(choice, described) == (
        "dropmatch generate 'YOUR PROMPT' --target 'my model' --draft D -L 8 --rule dropmatch --k 5 --p-drop 0.2 "
        "--guard-prob 0.05 --heads full --draft-weights int4 --min-confidence 0.4 --dtype float32"
    )
    plain = {"rule": "plain", "draft_length": 0}
    assert command_line(plain, described) == (
        "dropmatch generate 'YOUR PROMPT' --target 'my model' --draft none --dtype float32"
    )
    assert command_line(LOSSLESS, MADE) == "dropmatch generate 'YOUR PROMPT' --target T -L 8 --rule lossless"


def test_candidates_are_all_combinations_once() -> None:
    settings = TuneSettings(forms=("sampled", "full"), ks=(3, 5), p_drops=("0.1", "0.1"), guards=(0.0, 0.1))
    texts = [candidate.text for candidate in candidates(settings)]
    assert len(texts) == len(set(texts)) == 8
    assert "dropmatch@p=0.1@k=3@heads=full@guard=0.1" in texts
    with pytest.raises(UnknownNameError, match="form of the rule"):
        TuneSettings(forms=("sample",))
    with pytest.raises(ConfigError, match="ks is empty"):
        TuneSettings(ks=())
