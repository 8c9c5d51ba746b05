"""The compare command on a tiny pair: what it writes, and that a stopped run goes on where it was."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import tiny
from dropmatch.bench import answers, timings
from dropmatch.bench import compare as compare_module
from dropmatch.bench.settings import NEWER, CompareSettings
from dropmatch.bench.tables import table
from dropmatch.bench.takeover import prompt_digest
from dropmatch.cli import main
from dropmatch.cli import options as command_options
from dropmatch.errors import ConfigError, DataError
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
    assert result["speed"]["items"] == ["gsm8k/test/0", "gsm8k/test/1", "mt_bench/1"]  # the first two of each task
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


def test_a_rule_may_be_run_under_several_seeds(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    seeds = "dropmatch,dropmatch@seed=0,dropmatch@seed=1,dropmatch-expected,dropmatch-expected@seed=1"
    quick = ("--lengths", "3", "--speed-items", "0", "--p-drop", "0.3")
    arms = run(monkeypatch, pair, data, tmp_path / "a.json", *quick, "--rules", seeds)["arms"]

    def all_of(rule: str, figure: str) -> list[Any]:
        return [entry[figure] for entry in arms[f"{rule} L=3"]["items"].values()]

    assert all_of("dropmatch", "judged") == all_of("dropmatch@seed=0", "judged") != all_of("dropmatch@seed=1", "judged")
    assert all_of("dropmatch-expected", "tokens") == all_of("dropmatch-expected@seed=1", "tokens")


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
    real = answers._record

    def record(answer: Any) -> dict[str, Any]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(answer.item.id)
        return real(answer)

    monkeypatch.setattr(answers, "_record", record)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, output, *options)
    assert stop.value.code == 130
    assert "go on" in capsys.readouterr().err
    assert not output.exists()
    assert output.with_name("compare.json.journal").read_text().count("\n") == 4
    monkeypatch.setattr(answers, "_record", lambda *given: (made.append(given[0].item.id), real(*given))[1])
    resumed = run(monkeypatch, pair, data, output, *options)
    assert len(made) == 10
    for name, arm in whole["arms"].items():
        for item, entry in arm["items"].items():
            for key in ("tokens", "reasons", "texts", "rounds", "accepted_at", "score"):
                assert resumed["arms"][name]["items"][item][key] == entry[key]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of answers that are decoded, in order."""
    names: list[str] = []
    real = answers._record
    monkeypatch.setattr(answers, "_record", lambda answer: (names.append(answer.arm.rule), real(answer))[1])
    return names


QUIET = ("--lengths", "3", "--speed-items", "0")


def test_rules_and_prompts_can_be_added_to_a_result(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path, made: list[str]
) -> None:
    output = tmp_path / "compare.json"
    first = run(monkeypatch, pair, data, output, *QUIET, "--num", "3", "--rules", "lossless")
    made.clear()
    second = run(monkeypatch, pair, data, output, *QUIET, "--num", "4", "--rules", "lossless,dropmatch")
    assert sorted(made) == ["dropmatch"] * 4 + ["lossless"]
    for item, entry in first["arms"]["lossless L=3"]["items"].items():
        assert second["arms"]["lossless L=3"]["items"][item] == entry
    made.clear()
    run(monkeypatch, pair, data, output, *QUIET, "--num", "4", "--rules", "lossless", "--restart")
    assert len(made) == 4


def test_a_result_keeps_the_rules_that_are_not_named_again(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path, made: list[str]
) -> None:
    """They were dropped with their answers, and so was the speed where the second run timed nothing."""
    output = tmp_path / "compare.json"
    timed = ("--lengths", "3", "--speed-items", "1", "--num", "2")
    first = run(monkeypatch, pair, data, output, *timed, "--rules", "lossless,dropmatch@p=0.2")
    made.clear()
    second = run(monkeypatch, pair, data, output, *QUIET, "--num", "3", "--rules", "typical", "--lengths", "2")
    assert list(second["arms"]) == ["lossless L=3", "dropmatch@p=0.2 L=3", "typical L=2"]
    assert sorted(made) == ["dropmatch@p=0.2", "lossless", *["typical"] * 3]
    assert second["speed"] == first["speed"]
    assert second["settings"]["speed_items"] == 1
    third = run(monkeypatch, pair, data, output, *timed[:-1], "3", "--rules", "typical")
    assert set(third["speed"]["arms"]) == {"plain", *third["arms"]}


def test_a_result_of_other_settings_or_fewer_prompts_is_not_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "compare.json"
    run(monkeypatch, pair, data, output, *QUIET, "--num", "2", "--rules", "lossless")
    before = output.read_text()
    data.write_text(data.read_text().replace("boat 1", "ship 1"))
    for options, message in (
        (("--num", "2", "--seed", "5"), "seed: 0 then, 5 now"),
        (("--num", "1"), "has 1 prompts that were not given, such as 'gsm8k/test/1'"),
        (("--num", "2"), "'gsm8k/test/1' with another text"),
    ):
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, pair, data, output, *QUIET, "--rules", "lossless", *options)
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert message in said
        assert "--restart" in said
        assert output.read_text() == before
    result = run(monkeypatch, pair, data, output, *QUIET, "--num", "1", "--seed", "5", "--restart")
    assert list(result["prompts"]) == ["gsm8k/test/0"]


def test_what_is_taken_over_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "compare.json"
    first = run(monkeypatch, pair, data, output, *QUIET, "--num", "2", "--rules", "lossless")
    assert "Taken over" not in capsys.readouterr().err
    assert "earlier" not in first["provenance"]
    with monkeypatch.context() as stopped:
        stopped.setattr(compare_module, "measure_speed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            run(stopped, pair, data, output, *QUIET, "--num", "2", "--rules", "dropmatch")
    capsys.readouterr()
    timed = ("--lengths", "3", "--num", "3", "--rules", "typical", "--speed-items", "1")
    with monkeypatch.context() as stopped:
        stopped.setattr(compare_module, "score_records", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            run(stopped, pair, data, output, *timed)
    finished, left = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Taken over")]
    date = first["provenance"]["date"][:16].replace("T", " ")
    assert finished == f"Taken over from {output} (finished on {date} UTC): 2 of 6 answers."
    assert left.startswith(f"Taken over from {output}.journal (left on 20")
    assert left.endswith("UTC): 0 of 6 answers.")  # typical and lossless were asked for, the journal has dropmatch
    last = run(monkeypatch, pair, data, output, *timed)
    said = capsys.readouterr().err
    assert "): 4 of 6 answers." in said
    assert "): 3 of 3 timings." in said  # plain decoding is timed too
    assert last["provenance"]["earlier"] == [first["provenance"]]


def test_a_rule_that_another_run_adds_meanwhile_is_kept(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    """The methods of a file were read before the models, so that a file finished in between lost its new ones."""
    output = tmp_path / "compare.json"
    options = (*QUIET, "--num", "1")
    run(monkeypatch, pair, data, output, *options, "--rules", "lossless")
    load = command_options.load_decoder
    is_first = True

    def load_slowly(*arguments: Any, **more: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            run(monkeypatch, pair, data, output, *options, "--rules", "dropmatch")
        return load(*arguments, **more)

    monkeypatch.setattr(command_options, "load_decoder", load_slowly)
    result = run(monkeypatch, pair, data, output, *options, "--rules", "typical")
    assert set(result["arms"]) == {"lossless L=3", "dropmatch L=3", "typical L=3"}


def test_prompts_in_another_order_get_the_masks_that_they_had(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    """A prompt's masks hang on its place, which was another one in a file that was extended."""
    output = tmp_path / "compare.json"
    at_once = run(monkeypatch, pair, data, tmp_path / "once.json", *QUIET, "--rules", "lossless,dropmatch@p=0.3")
    run(monkeypatch, pair, data, output, *QUIET, "--rules", "lossless")
    data.write_text("".join(reversed(data.read_text().splitlines(keepends=True))))
    result = run(monkeypatch, pair, data, output, *QUIET, "--rules", "dropmatch@p=0.3")
    assert list(result["prompts"]) == list(at_once["prompts"])
    texts = [{item: r["tokens"] for item, r in made["arms"]["dropmatch@p=0.3 L=3"]["items"].items()}
             for made in (at_once, result)]  # fmt: skip
    assert texts[0] == texts[1]


def test_answers_of_a_model_trained_further_are_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    """Both went by the folder's name."""
    own, output = tiny.save_pair(tmp_path / "pair"), tmp_path / "compare.json"
    options = (*QUIET, "--num", "1", "--rules", "lossless")
    run(monkeypatch, own, data, output, *options)
    tiny.save(own.target, tiny.target(seed=9))
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, own, data, output, *options)
    assert stop.value.code == 2
    assert "(target_digest: " in capsys.readouterr().err


def test_files_of_older_versions_are_extended(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path, made: list[str]
) -> None:
    """They hold neither a digest of the weights nor the caps of single prompts; nor do journals."""
    output = tmp_path / "compare.json"
    journal = output.with_name("compare.json.journal")
    options = (*QUIET, "--num", "2", "--rules", "lossless")
    result = run(monkeypatch, pair, data, output, *options)
    for name in NEWER:
        result["settings"].pop(name, None)
    for prompt in result["prompts"].values():
        del prompt["max_new_tokens"], prompt["stop"]
    output.write_text(json.dumps(result))
    shared = {
        name: value
        for name, value in result["settings"].items()
        if name not in ("data", "rules", "lengths", "arm_dropout", "batch", "items", *compare_module._SPEED_SETTINGS)
    }
    (record,) = (r for item, r in result["arms"]["lossless L=3"]["items"].items() if item.endswith("/1"))
    digest = prompt_digest(
        ["how fast is boat 1\nThink step by step, and give the answer as a number on the last line."]
    )
    entry = {"arm": "dropmatch L=3", "item": "gsm8k/test/1", "prompt": digest, "record": record}
    journal.write_text("".join(json.dumps(line) + "\n" for line in (shared, entry)))
    made.clear()
    run(monkeypatch, pair, data, output, *QUIET, "--num", "2", "--rules", "dropmatch")
    assert made == ["dropmatch"]


def test_answers_under_another_cap_are_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tiny.TinyPair, tmp_path: Path
) -> None:
    """A task's own cap is no setting of the command."""
    output, data = tmp_path / "compare.json", tmp_path / "p.jsonl"
    arguments = ("--target", str(pair.target), "--draft", str(pair.draft), "--data", str(data), "-o", str(output))
    for task, code in (("prompts", 0), ("alpaca", 2)):
        data.write_text(json.dumps({"id": "a", "task": task, "prompt": "why is the sky blue"}) + "\n")
        monkeypatch.setattr("sys.argv", ["dropmatch", "compare", *arguments, *QUIET, "--rules", "lossless"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == code
    assert "another text, cap on tokens or stop string" in capsys.readouterr().err


def test_prompts_are_written_out_for_reports_later_too(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path, made: list[str]
) -> None:
    """A finished file took no notice of --strips."""
    output = tmp_path / "compare.json"
    options = (*QUIET, "--num", "2", "--rules", "dropmatch")
    first = run(monkeypatch, pair, data, output, *options, "--strips", "0")
    assert not any("pieces" in record for record in first["arms"]["dropmatch L=3"]["items"].values())
    made.clear()
    records = list(
        run(monkeypatch, pair, data, output, *options, "--strips", "1")["arms"]["dropmatch L=3"]["items"].values()
    )
    assert made == []
    assert ["pieces" in record for record in records] == [True, False]


def test_timings_of_other_settings_or_prompts_are_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    """A journal's timings went by method, id and repeat alone: those of longer answers or other prompts stood in."""
    output = tmp_path / "compare.json"
    timed: list[tuple[str, str, int]] = []
    limit = 100
    real = timings._time_one

    def time_one(decoder: Any, arm: Any, settings: Any, item: Any, count: int) -> Any:
        if len(timed) == limit:
            raise KeyboardInterrupt
        timed.append((arm.name, item.id, count))
        return real(decoder, arm, settings, item, count)

    monkeypatch.setattr(timings, "_time_one", time_one)
    monkeypatch.setattr(timings, "_WARM_UP", 3)

    def measure(*options: str, stop: int = 100) -> dict[str, Any] | None:
        nonlocal limit
        timed.clear()
        limit = stop
        options = ("--lengths", "3", "--num", "3", "--rules", "lossless", *options)
        try:
            return run(monkeypatch, pair, data, output, *options)
        except SystemExit:
            return None

    assert measure("--speed-items", "2", "--repeats", "2", "--speed-tokens", "12", stop=9) is None
    assert measure("--speed-items", "2", "--repeats", "2", "--speed-tokens", "8", stop=4) is None  # two warm up
    assert [count for *_, count in timed] == [3, 3, 8, 8]
    data.write_text(data.read_text().replace("boat 0", "ship 0"))
    assert measure("--speed-items", "2", "--repeats", "2", "--speed-tokens", "8", stop=4) is None
    result = measure("--speed-items", "1", "--repeats", "1", "--speed-tokens", "8")
    assert result is not None
    assert timed == []
    assert result["speed"]["items"] == ["gsm8k/test/0"]
    for arm in result["speed"]["arms"].values():
        assert {item: len(seconds) for item, seconds in arm["seconds"].items()} == {"gsm8k/test/0": 1}
        assert arm["time"]["target_s"] + arm["time"]["judge_s"] <= sum(arm["seconds"]["gsm8k/test/0"])


def test_transformers_generate_is_timed_beside_them(
    monkeypatch: pytest.MonkeyPatch, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="speed_items=0 times nothing"):
        CompareSettings(with_generate=True)
    output = tmp_path / "compare.json"
    options = ("--lengths", "3", "--num", "2", "--speed-items", "2", "--speed-tokens", "8", "--repeats", "2")
    result = run(monkeypatch, pair, data, output, *options)
    with pytest.raises(DataError, match=r"was not timed\. Measure with `dropmatch compare --generate`"):
        table([(output, "compare.json")], "generate")

    result = run(monkeypatch, pair, data, output, *options, "--generate", "--rules", "dropmatch")
    timed = result["speed"]["arms"]
    assert list(timed) == ["plain", "lossless L=3", "dropmatch L=3", "transformers generate"]
    generate = timed["transformers generate"]
    assert {item: len(seconds) for item, seconds in generate["seconds"].items()} == {
        "gsm8k/test/0": 2,
        "gsm8k/test/1": 2,
    }
    assert set(generate["tokens"].values()) == {8}
    assert "transformers generate" not in result["arms"]  # it has no answers that are graded
    row = next(row for row in result["summary"] if row["arm"] == "dropmatch L=3")
    rates = [
        arm["tokens"]["gsm8k/test/0"] / statistics.median(arm["seconds"]["gsm8k/test/0"])
        for arm in (timed["dropmatch L=3"], generate)
    ]
    assert row["over_generate"]["min"] <= rates[0] / rates[1] <= row["over_generate"]["max"]

    (shown,) = tables(table([(output, "compare.json")], "generate"))
    assert column(shown, "method") == [f"`{arm}`" for arm in timed]
    assert column(shown, "over `generate`")[3] == "1.00x (1.00-1.00)"
    assert column(shown, "over `generate`")[2].startswith(f"{row['over_generate']['median']:.2f}x")
    assert column(shown, "tau")[0] == ""  # plain decoding was timed, not graded
    assert column(shown, "accuracy")[1] != ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arm": "lossless L=3"}', "'record' is missing"),
        ('{"record": {}}', "'arm' is missing"),
        ('{"arm": "a", "item": "b", "prompt": "c", "record": {"tokens": []}}', "record.text is missing"),
        ('{"speed": {"arm": "plain"}}', "speed.item is missing"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_a_damaged_journal_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: tiny.TinyPair,
    data: Path,
    tmp_path: Path,
    line: str,
    message: str,
) -> None:
    output = tmp_path / "compare.json"
    options = ("--lengths", "3", "--num", "1", "--rules", "lossless", "--speed-items", "1")
    with monkeypatch.context() as stopped:
        stopped.setattr(compare_module, "measure_speed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            run(monkeypatch, pair, data, output, *options)
    with output.with_name("compare.json.journal").open("a") as file:
        file.write(line + "\n")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, output, *options)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "compare.json.journal, line 3: " in said
    assert message in said


def damaged(change: str) -> str:
    """A finished comparison of one prompt with something wrong."""
    record = {"text": "", "tokens": [], "reasons": [], "logprobs": [], "lossy": [], "judged": [], "score": {}}
    arm: dict[str, Any] = {"rule": "lossless", "draft_length": 3, "items": {"gsm8k/test/0": record}}
    turns = ["how fast is boat 0\nThink step by step, and give the answer as a number on the last line."]
    result: dict[str, Any] = {
        "kind": "compare",
        "format": 1,
        "settings": {},
        "prompts": {"gsm8k/test/0": {"task": "gsm8k", "turns": turns}},
        "arms": {"lossless L=3": arm},
    }
    if change == "no turns":
        del result["prompts"]["gsm8k/test/0"]["turns"]
    if change == "an arm is a list":
        result["arms"]["lossless L=3"] = []
    if change == "no items":
        del arm["items"]
    return json.dumps(result)


@pytest.mark.parametrize("change", ["no turns", "an arm is a list", "no items"])
def test_damaged_parts_of_a_result_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: tiny.TinyPair,
    data: Path,
    tmp_path: Path,
    change: str,
) -> None:
    output = tmp_path / "c.json"
    output.write_text(damaged(change))
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, pair, data, output, *QUIET, "--num", "1")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"{output}: " in said
    assert "damaged" in said


def test_damaged_answers_of_a_result_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "c.json"
    result = run(monkeypatch, pair, data, output, *QUIET, "--num", "1")
    at = "arms['lossless L=3'].items['gsm8k/test/0']"
    first = result["arms"]["lossless L=3"]["items"]["gsm8k/test/0"]
    nothing = {"tokens": [], "pieces": [], "reasons": [], "logprobs": [], "lossy": [], "judged": []}
    for change, message in (
        ({"texts": ...}, f"{at}.texts is missing"),
        ({"rounds": ...}, f"{at}.rounds is missing"),
        ({"rounds": 0}, f"{at} has no round or no token"),
        ({"rounds": 10**400}, f"{at}.rounds is too large a number"),
        ({"tokens": [2**31, *first["tokens"][1:]]}, f"{at} has 2147483648, which is no token"),
        (nothing, f"{at} has no round or no token"),
        ({"accepted_at": []}, f"{at} counts drafted and kept tokens at unlike numbers of places"),
    ):
        broken = json.loads(json.dumps(result))
        record = broken["arms"]["lossless L=3"]["items"]["gsm8k/test/0"]
        record |= {key: value for key, value in change.items() if value is not ...}
        for key in (key for key, value in change.items() if value is ...):
            del record[key]
        output.write_text(json.dumps(broken))
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, pair, data, output, *QUIET, "--num", "1")
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    for speed in ([], {"items": ["gsm8k/test/0"], "arms": {"plain": {}}}, {"items": ["gone"], "arms": {}}):
        output.write_text(json.dumps({**result, "speed": speed}))
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, pair, data, output, *QUIET, "--num", "1")
        assert stop.value.code == 2
        assert "The file is damaged" in capsys.readouterr().err


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
    assert f"{data}: the id 'gsm8k/test/0' is taken already ({data})" in capsys.readouterr().err


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
