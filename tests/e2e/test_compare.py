"""The compare command on a tiny pair: what it writes, and that a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from dropmatch.bench import compare as compare_module
from dropmatch.bench.tables import table
from dropmatch.cli import main
from tabled import column, tables


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.jsonl"
    lines = [
        {"id": f"gsm8k/test/{i}", "task": "gsm8k", "prompt": f"how fast is boat {i}", "answer": str(i), "meta": {}}
        for i in range(4)
    ]
    turns = {"id": "mt_bench/1", "task": "mt_bench", "turns": ["why is the sky blue", "and the train"], "meta": {}}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, turns]))
    return path


def run(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, output: Path, *options: str
) -> dict[str, Any]:
    arguments = ["--target", str(pair.target), "--draft", str(pair.draft), "--data", str(data), "-o", str(output)]
    small = ["-n", "24", "--speed-tokens", "8", "--p-drop", "0.1"]
    monkeypatch.setattr("sys.argv", ["dropmatch", "compare", *arguments, *small, *options])
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
    result: dict[str, Any] = json.loads(output.read_text(), parse_constant=lambda name: pytest.fail(name))
    return result


def test_a_comparison_holds_all_that_it_promises(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: tiny.TinyPair,
    data: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "compare.json"
    rules = "plain,lossless,dropmatch,dropmatch@p=0.2@k=3,top-k(k=2,ratio=0.1)"
    result = run(monkeypatch, pair, data, output, "--rules", rules, "--lengths", "3", "--speed-items", "2")
    arms = result["arms"]
    assert list(arms) == [
        "plain",
        "lossless L=3",
        "dropmatch L=3",
        "dropmatch@p=0.2@k=3 L=3",
        "top-k(k=2,ratio=0.1) L=3",
    ]
    assert result["settings"]["arm_dropout"]["dropmatch@p=0.2@k=3 L=3"] == {"k": 3, "p_drop": 0.2}
    for item in result["prompts"]:
        assert arms["plain"]["items"][item]["tokens"] == arms["lossless L=3"]["items"][item]["tokens"]
    lossy = arms["dropmatch L=3"]["items"]
    for entry in lossy.values():
        assert len(entry["tokens"]) == len(entry["reasons"]) == len(entry["logprobs"])
        assert entry["text"].replace("\n\n", "") == "".join(entry["texts"]).replace("\n\n", "")
        assert sum(token["index"] < len(entry["tokens"]) for token in entry["lossy"]) == len(entry["lossy"])
        for at, js, radius, reason, prob in entry["judged"]:
            assert -1 <= at < len(entry["tokens"])
            assert (at == -1) == (reason == 0) or at == -1
            assert js >= 0
            assert radius >= 0
            assert 0 <= prob <= 1
            if at >= 0:
                assert entry["reasons"][at] == reason
    assert any(entry["lossy"] for entry in lossy.values())
    assert len(lossy["mt_bench/1"]["texts"]) == 2
    pieces = lossy["gsm8k/test/0"]["pieces"]
    assert len(pieces) == len(lossy["gsm8k/test/0"]["tokens"])
    tokenizer = tiny.tokenizer()
    written_out = [token for item in lossy if "pieces" in lossy[item] for token in lossy[item]["lossy"]]
    assert written_out
    for token in written_out:
        assert token["best_piece"] == tokenizer.decode([token["best_token"]])
    assert {row["task"] for row in result["summary"]} == {"all", "gsm8k", "mt_bench"}
    by_rule = {row["rule"]: row for row in result["summary"] if row["task"] == "all"}
    assert by_rule["dropmatch"]["tau"] >= by_rule["lossless"]["tau"]
    assert by_rule["dropmatch"]["over_plain"]["median"] > 0
    assert by_rule["plain"]["tau"] == 1.0
    assert result["provenance"]["command"].startswith("dropmatch compare")
    assert not output.with_name("compare.json.journal").exists()
    assert "lossless L=3" in capsys.readouterr().out
    (every,), (trade,), (paper6,) = (
        tables(table([(output, "compare.json")], form)) for form in ("", "pareto", "paper-6")
    )
    assert column(every, "task").count("mt_bench") == len(arms)
    assert sorted(cell.strip("*") for cell in column(trade, "rule")) == sorted(arms)
    assert [cells[0] for cells in paper6[1:]] == ["lossless L=3", "dropmatch L=3", "dropmatch@p=0.2@k=3 L=3"]


def test_batch_mates_and_other_arms_change_nothing(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    quick = ("--lengths", "3", "--speed-items", "0")
    together = run(
        monkeypatch, pair, data, tmp_path / "a.json", *quick, "--rules", "lossless,dropmatch", "--batch", "9"
    )
    alone = run(monkeypatch, pair, data, tmp_path / "b.json", *quick, "--rules", "dropmatch", "--batch", "1")
    for item, entry in alone["arms"]["dropmatch L=3"]["items"].items():
        assert entry["tokens"] == together["arms"]["dropmatch L=3"]["items"][item]["tokens"]


def test_a_stopped_run_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: tiny.TinyPair,
    data: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "compare.json"
    options = ("--lengths", "3", "--speed-items", "1", "--batch", "2")
    whole = run(monkeypatch, pair, data, tmp_path / "whole.json", *options)
    made: list[str] = []
    real = compare_module._record

    def record(answer: Any, decoder: Any) -> dict[str, Any]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(answer.item.id)
        return real(answer, decoder)

    monkeypatch.setattr(compare_module, "_record", record)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, output, *options)
    assert stop.value.code == 130
    assert "go on" in capsys.readouterr().err
    assert not output.exists()
    assert output.with_name("compare.json.journal").read_text().count("\n") == 4
    monkeypatch.setattr(compare_module, "_record", lambda *given: (made.append(given[0].item.id), real(*given))[1])
    resumed = run(monkeypatch, pair, data, output, *options)
    assert len(made) == 10
    for name, arm in whole["arms"].items():
        for item, entry in arm["items"].items():
            for key in ("tokens", "reasons", "texts", "rounds", "accepted_at", "score"):
                assert resumed["arms"][name]["items"][item][key] == entry[key]


def test_rules_and_prompts_can_be_added_to_a_result(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "compare.json"
    quick = ("--lengths", "3", "--speed-items", "0")
    first = run(monkeypatch, pair, data, output, *quick, "--num", "3", "--rules", "lossless")
    made: list[str] = []
    real = compare_module._record
    monkeypatch.setattr(compare_module, "_record", lambda *given: (made.append(given[0].item.id), real(*given))[1])
    second = run(monkeypatch, pair, data, output, *quick, "--num", "4", "--rules", "lossless,dropmatch")
    assert len(made) == 5  # four of dropmatch, one of lossless
    for item, entry in first["arms"]["lossless L=3"]["items"].items():
        assert second["arms"]["lossless L=3"]["items"][item] == entry
    made.clear()
    run(monkeypatch, pair, data, output, *quick, "--num", "4", "--rules", "lossless", "--restart")
    assert len(made) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rules", "dropmach"), "Did you mean"),
        (("--rules", "dropmatch@p=7"), "out of range"),
        (("--lengths", "0"), "--lengths"),
    ],
)
def test_bad_options_are_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: tiny.TinyPair,
    data: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, tmp_path / "c.json", *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_prompt_given_twice_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, tmp_path / "c.json", "--data", str(data))
    assert stop.value.code == 2
    assert "gsm8k/test/0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"kind": "bench-quick"}', '{"kind": "compare", "format": 1}'])
def test_a_damaged_result_is_not_written_over(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: tiny.TinyPair,
    data: Path,
    tmp_path: Path,
    text: str,
) -> None:
    output = tmp_path / "c.json"
    output.write_text(text)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, output)
    assert stop.value.code == 2
    assert str(output) in capsys.readouterr().err
    assert output.read_text() == text
