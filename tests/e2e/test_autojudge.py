"""From prompts to a judge to its tables, on a tiny pair: train judge, then bench autojudge, stopped and resumed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from dropmatch.bench import autojudge as autojudge_module
from dropmatch.bench.tables import table
from dropmatch.bench.tasks import Item, Score, load_items
from dropmatch.cli import main
from dropmatch.errors import ConfigError
from dropmatch.judge import judge_info, load_judge, save_judge
from dropmatch.training import judge as training
from tabled import column, tables
from toys import judge_head

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


def questions(path: Path, numbers: range) -> Path:
    lines = [
        {"id": f"gsm8k/test/{i}", "task": "gsm8k", "prompt": f"how fast is boat {i}", "answer": str(i), "meta": {}}
        for i in numbers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions(tmp_path_factory.mktemp("data") / "gsm8k.jsonl", range(8))


Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tiny.TinyPair) -> Command:
    """Runs a command on the tiny pair and gives standard output, or standard error of one that failed with `code`."""

    def run(*arguments: object, code: int = 0) -> str:
        on_pair = [] if "convert-judge" in arguments else ["--target", pair.target]
        if on_pair and "--draft" not in arguments:
            on_pair += ["--draft", pair.draft]
        monkeypatch.setattr("sys.argv", ["dropmatch", *map(str, [*arguments, *on_pair])])
        capsys.readouterr()
        ended = 0
        try:
            main()
        except SystemExit as stop:
            ended = stop.code or 0
        out, err = capsys.readouterr()
        assert ended == code, err
        return err if code else out

    return run


SMALL = ("-n", "24", "--validation", "0.4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pair: tiny.TinyPair, data: Path) -> Path:
    """A judge on both models' states, and the labels it was fitted to."""
    folder = tmp_path_factory.mktemp("judge")
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["train", "judge", "--data", data, "-o", folder, *SMALL]
        patch.setattr(
            "sys.argv", ["dropmatch", *map(str, arguments), "--target", str(pair.target), "--draft", str(pair.draft)]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    return folder


# --- training ---


def test_a_trained_judge_says_how_it_came_to_be(trained: Path, data: Path) -> None:
    info, head = judge_info(trained), load_judge(trained)
    assert (head.features, head.draft_size, head.target_size) == ("DD-DT", 32, 32)
    assert len(head.thresholds) == 26
    assert info["items"] == [item.id for item in load_items(data)]
    assert info["tasks"] == ["gsm8k"]
    assert info["data"] == ["gsm8k.jsonl"]
    assert 0.0 <= info["auc"] <= 1.0
    assert info["training"]["labels"] + info["validation"]["labels"] == info["mining"]["rollouts"]
    assert info["validation"]["prompts"] == 3
    references = [entry["reference"] for entry in json.loads((trained / "labels.json").read_text())["items"]]
    assert info["mining"]["answers_cut_off"] == sum(len(reference) == 24 for reference in references)
    assert set(info["validation"]["prompt_ids"]) < set(info["items"])
    assert info["provenance"]["command"].startswith("dropmatch train judge")
    assert not (trained / "labels.json.journal").exists()


def test_other_features_are_fitted_to_the_same_labels(
    command: Command, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_mine", lambda *_: pytest.fail("mined again"))
    labels = trained / "labels.json"
    before = labels.read_text()
    out = command("train", "judge", "--data", data, "-o", tmp_path, "--labels", labels, "--features", "DT", *SMALL)
    assert labels.read_text() == before
    assert load_judge(tmp_path).features == "DT"
    assert json.loads(out.splitlines()[-1])["mining"] == judge_info(trained)["mining"]


def test_wrong_answers_can_be_left_out_of_what_is_learned(
    command: Command, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = json.loads((trained / "labels.json").read_text())
    for entry in held["items"][:5]:
        entry["reference"] = entry["reference"][:-1]  # as if it had ended; all answers of this pair are cut off
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(held))
    right = {f"gsm8k/test/{i}" for i in (0, 1, 3, 4, 6, 7)}
    kept = [entry for entry in held["items"] if entry["item"] in right and len(entry["reference"]) < 24]
    assert 2 <= len(kept) < len(right)

    def grade(self: object, answers: list[tuple[str, str]]) -> list[Score]:
        return [Score(key in right, text) for key, text in answers]

    monkeypatch.setattr(training.TaskGrader, "grade", grade)
    arguments = ("train", "judge", "--data", data, "-o", tmp_path, "--right-only", "-n", "24")
    command(*arguments, "--folds", "2")
    info = judge_info(tmp_path)
    assert info["right_only"]
    assert info["folds"] == 2
    assert info["training"]["labels"] == sum(len(entry["labels"]) for entry in kept)
    assert set(info["validation"]["prompt_ids"]) == {entry["item"] for entry in kept if entry["labels"]}
    assert len(info["items"]) == 8  # wrong ones too were seen, and must not be evaluated on

    monkeypatch.setattr(training.TaskGrader, "grade", lambda self, answers: [Score(False, "1") for _ in answers])
    assert "answered none of 8 prompts rightly" in command(*arguments, code=2)


def test_stopped_mining_goes_on_where_it_was(
    command: Command, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = training._entry

    def entry(mined: Any) -> dict[str, Any]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(mined.prompt.key)
        return real(mined)

    arguments = ("train", "judge", "--data", data, "-o", tmp_path, "--batch", "2", *SMALL)
    monkeypatch.setattr(training, "_entry", entry)
    assert "go on" in command(*arguments, code=130)
    assert not (tmp_path / "labels.json").exists()
    monkeypatch.setattr(training, "_entry", lambda mined: (made.append(mined.prompt.key), real(mined))[1])
    command(*arguments)
    assert len(made) == 8
    whole, resumed = (json.loads((folder / "labels.json").read_text()) for folder in (trained, tmp_path))
    by_item = [{entry["item"]: entry for entry in result["items"]} for result in (whole, resumed)]
    assert by_item[0] == by_item[1]  # the batch plays no part either
    assert load_judge(tmp_path).digest == load_judge(trained).digest


def test_prompts_can_be_added_to_labels_and_none_are_lost(
    command: Command, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = tmp_path / "labels.json"
    labels.write_bytes((trained / "labels.json").read_bytes())
    mined: list[str] = []
    real = training._mine
    monkeypatch.setattr(training, "_mine", lambda *given: (mined.extend(p.key for p in given[3]), real(*given))[1])
    more = questions(tmp_path / "gsm8k.jsonl", range(6, 10))
    command("train", "judge", "--data", more, "-o", tmp_path, *SMALL)
    assert mined == ["gsm8k/test/8", "gsm8k/test/9"]
    assert {entry["item"] for entry in json.loads(labels.read_text())["items"]} == {
        f"gsm8k/test/{i}" for i in range(10)
    }
    assert judge_info(tmp_path)["items"] == [f"gsm8k/test/{i}" for i in range(6, 10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--features", "TT"), "Unknown features 'TT'"),
        (("--label-share", "0"), "label_share"),
        (("--validation", "1.5"), "validation=1.5 is out of range"),
        (("--seed", "4294967296"), "seed=4294967296 is out of range"),
        (("--draft", "ngram"), "A judge is trained for a draft model"),
        (("--num", "9"), "has 8 items"),
        (("--num", "1"), "Labels of 1 prompts cannot be split"),
        (("--folds", "9"), "cannot be dealt into 9 folds"),
    ],
)
def test_bad_options_of_training_are_named(
    command: Command, data: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    arguments = ("train", "judge", "--data", data, "-o", tmp_path / "judge", "-n", "8")
    assert message in command(*arguments, *options, code=2)
    assert not (tmp_path / "judge" / "judge.json").exists()


def test_labels_made_with_other_settings_are_not_mixed_in(
    command: Command, trained: Path, data: Path, tmp_path: Path
) -> None:
    labels = trained / "labels.json"
    before = labels.read_text()
    arguments = ("train", "judge", "--data", data, "-o", tmp_path, "--labels", labels, "--validation", "0.4")
    error = command(*arguments, "-n", "16", code=2)
    assert "labels of another max_new_tokens (24, and now 16)" in error
    assert labels.read_text() == before


@pytest.mark.parametrize("text", ["{", '{"kind": "compare"}', '{"kind": "judge-labels", "format": 1}'])
def test_a_damaged_labels_file_is_not_written_over(command: Command, data: Path, tmp_path: Path, text: str) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text(text)
    assert str(labels) in command("train", "judge", "--data", data, "-o", tmp_path, *SMALL, code=2)
    assert labels.read_text() == text


def test_answers_without_anything_to_compare_are_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "mt_bench.jsonl"
    path.write_text(json.dumps({"id": "mt/1", "task": "mt_bench", "turns": ["a", "b"], "meta": {}}) + "\n")
    error = command("train", "judge", "--data", path, "-o", tmp_path / "judge", code=2)
    assert "mt/1: answers of task 'mt_bench' cannot be compared" in error


def test_pickles_are_converted(command: Command, tmp_path: Path) -> None:
    head, path = judge_head(6), tmp_path / "judge.pkl"
    arrays = {"mean": head.mean.numpy(), "scale": head.scale.numpy(), "weights": head.weight.numpy(), "bias": 0.0}
    path.write_bytes(pickle.dumps({**arrays, "thresholds": list(head.thresholds)}))
    command("train", "convert-judge", path, tmp_path / "judge", "--features", "DD-DT", "--draft-size", "2")
    assert load_judge(tmp_path / "judge").draft_size == 2
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "names os.system, which no judge needs" in command("train", "convert-judge", path, tmp_path / "b", code=2)
    assert not (tmp_path / "b" / "judge.json").exists()


# --- what counts as the same answer ---


def _item(task: str) -> Item:
    return Item("x", task, ("?",), {}, (), 8)


@pytest.mark.parametrize(
    ("task", "reference", "other", "same"),
    [
        ("gsm8k", Score(None, {}, "1,200"), Score(None, {}, "$1200."), True),
        ("gsm8k", Score(None, {}, "12"), Score(None, {}, "13"), False),
        ("gsm8k", Score(None, {}, None), Score(None, {}, None), True),
        ("gsm8k", Score(None, {}, "12"), Score(None, {}, None), False),
        ("gsm8k", Score(True, {}, "12"), Score(False, {}, "12"), True),  # ground truth plays no part
        ("mbpp", Score(False, {}, "code"), Score(False, {}, "other"), True),  # failing both times is the same
        ("mbpp", Score(True, {}, "code"), Score(False, {}, "code"), False),
        ("mmlu", Score(False, {}, "A"), Score(False, {}, "A"), True),
        ("mmlu", Score(False, {}, "A"), Score(False, {}, "B"), False),
    ],
)
def test_answers_are_compared_with_the_targets_own(task: str, reference: Score, other: Score, same: bool) -> None:
    assert training.TaskGrader([_item(task)]).same("x", reference, other) is same


def test_equal_texts_are_graded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        training, "score_all", lambda items, texts: [asked.append(t) or Score(None, {}, t) for (t,) in texts]
    )
    grader = training.TaskGrader([_item("gsm8k")])
    assert [score.extracted for score in grader.grade([("x", "1"), ("x", "2"), ("x", "1")])] == ["1", "2", "1"]
    grader.grade([("x", "2")])
    assert asked == ["1", "2"]


def test_code_is_the_same_if_the_tests_say_the_same(tmp_path: Path) -> None:
    record = {
        "id": "mbpp/1", "task": "mbpp", "prompt": "Double a number.", "entry_point": "double",
        "tests": ["assert double(2) == 4"], "meta": {},
    }  # fmt: skip
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(record) + "\n")
    grader = training.TaskGrader(load_items(path))
    texts = ["```python\ndef double(x):\n    return 2 * x\n```", "```python\ndef double(x):\n    return x + x\n```"]
    texts += ["```python\ndef double(x):\n    return x\n```", "no code"]
    right, too, wrong, none = grader.grade([("mbpp/1", text) for text in texts])
    assert grader.same("mbpp/1", right, too)
    assert not grader.same("mbpp/1", right, wrong)
    assert grader.same("mbpp/1", wrong, none)


# --- the tables ---

QUICK = ("-n", "16", "--thresholds", "q0.2,0.6", "--p-drops", "0.05,0.1", "--window", "8", "--base-lengths", "4")
TIMED = ("--speed-items", "1", "--speed-tokens", "6")


def test_the_benchmark_makes_the_tables_and_figures(
    command: Command, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = questions(tmp_path / "new.jsonl", range(20, 24))
    far = tmp_path / "ifeval.jsonl"
    kinds = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    lines = [{"id": f"ifeval/{i}", "task": "ifeval", "prompt": f"boat {i}", "meta": kinds} for i in range(3)]
    far.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = ("--num-gsm8k", "4", "--num-ifeval", "3")
    arguments = ("bench", "autojudge", "--judge", trained, "--gsm8k", new, "--ifeval", far, *counts, *QUICK, *TIMED)
    out = command(*arguments, "-o", tmp_path / "out")
    result = json.loads(
        (tmp_path / "out" / "autojudge.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert json.loads(out.splitlines()[-1])["table8"] == result["table8"]
    assert result["parts"]["gsm8k"]["judge"]["in_distribution"] is True
    assert result["parts"]["ifeval"]["judge"]["in_distribution"] is False
    assert result["table9"] == []
    head = load_judge(trained)
    assert [row["threshold"] for row in result["table8"]] == pytest.approx([head.threshold("q0.2"), 0.6])
    assert [row["quantile"] for row in result["table8"]] == ["q0.2", None]
    for row in result["table8"]:
        assert set(row["dropmatch+judge"]) == {"0.05", "0.1"}
        for cells in (row["judge"], *row["dropmatch+judge"].values()):
            assert cells["n"] == 4
            assert cells["tau_low"] <= cells["tau"] <= cells["tau_high"]
            assert cells["accuracy_low"] <= cells["accuracy"] <= cells["accuracy_high"]
            assert cells["tokens_per_second"] > 0
    # each cell is that of the arm it names
    written = json.loads((tmp_path / "out" / "gsm8k.json").read_text())
    by_arm = {row["arm"]: row for row in written["summary"]}
    assert written["settings"]["arm_dropout"]["dropmatch+judge(threshold=0.6)@p=0.05 L=8"]["p_drop"] == 0.05
    for at, given in enumerate(("q0.2", "0.6")):
        assert result["table8"][at]["judge"]["tau"] == by_arm[f"judge(threshold={given}) L=8"]["tau"]
        for p in ("0.05", "0.1"):
            arm = f"dropmatch+judge(threshold={given})@p={p} L=8"
            assert result["table8"][at]["dropmatch+judge"][p]["tau"] == by_arm[arm]["tau"]
    curves = {curve["name"]: curve["points"] for curve in result["figure6"]}
    assert set(curves) == {
        "lossless",
        "judge",
        *(f"{m} p={p}" for m in ("dropmatch", "dropmatch+judge") for p in (0.05, 0.1)),
    }
    for points in curves.values():
        assert [point["tau"] for point in points] == sorted(point["tau"] for point in points)
        assert all(point["accuracy_low"] <= point["accuracy"] <= point["accuracy_high"] for point in points)
    assert len(curves["lossless"]) == 2
    by_threshold, _, far_curves = tables(table([(tmp_path / "out" / "autojudge.json", "autojudge.json")]))
    assert [cell.split(" ")[0] for cell in column(by_threshold, "with DropMatch p=0.1: tau")[2:4]] == [
        f"{row['dropmatch+judge']['0.1']['tau']:.2f}" for row in result["table8"]
    ]
    assert len(far_curves) == 1 + sum(map(len, curves.values()))
    # a finished part is not run again; a changed one is
    monkeypatch.setattr(autojudge_module, "run_compare", lambda *_, **__: pytest.fail("run again"))
    command(*arguments, "-o", tmp_path / "out")
    again = json.loads((tmp_path / "out" / "autojudge.json").read_text())
    assert again["rows"] == result["rows"]
    monkeypatch.setattr(autojudge_module, "run_compare", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    for changed in (("--seed", "1"), ("--k", "3"), ("--heads", "full"), ("--speed-items", "2"), ("--restart",)):
        assert "go on" in command(*arguments, *changed, "-o", tmp_path / "out", code=130)


def test_threshold_zero_is_lossless_decoding(command: Command, trained: Path, tmp_path: Path) -> None:
    new = questions(tmp_path / "new.jsonl", range(20, 22))
    arguments = ("bench", "autojudge", "--judge", trained, "--gsm8k", new, "--num-gsm8k", "2", "--speed-items", "0")
    command(*arguments, "-n", "16", "--thresholds", "0,1.1", "--window", "32", "-o", tmp_path)
    arms = json.loads((tmp_path / "gsm8k.json").read_text())["arms"]
    for item, record in arms["judge(threshold=0) L=32"]["items"].items():
        assert record["tokens"] == arms["lossless L=32"]["items"][item]["tokens"]
    every = arms["judge(threshold=1.1) L=32"]["items"].values()
    assert all(record["accepted"] == record["drafted"] for record in every)


def test_prompts_that_the_judge_learned_from_are_refused(
    command: Command, trained: Path, data: Path, tmp_path: Path
) -> None:
    arguments = ("bench", "autojudge", "--judge", trained, "--gsm8k", data, "--num-gsm8k", "2", "-o", tmp_path, *QUICK)
    error = command(*arguments, code=2)
    assert "gsm8k/test/0 was among the prompts" in error
    assert "--start-gsm8k" in error


def test_prompts_are_known_again_by_their_text(command: Command, trained: Path, data: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    renamed, other = tmp_path / "renamed.jsonl", tmp_path / "other.jsonl"
    renamed.write_text("".join(json.dumps(line | {"id": f"gsm8k/{i}"}) + "\n" for i, line in enumerate(lines)))
    other.write_text("".join(json.dumps(line | {"prompt": f"{line['prompt']}, then"}) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="gsm8k/0 was among the prompts"):
        autojudge_module.make_part("gsm8k", load_items(renamed), "renamed.jsonl", trained)
    autojudge_module.make_part("gsm8k", load_items(other), "other.jsonl", trained)
    info = judge_info(trained)
    del info["prompts"]  # as earlier versions wrote it
    save_judge(load_judge(trained), tmp_path / "old", {k: v for k, v in info.items() if k in ("items", "tasks")})
    with pytest.raises(ConfigError, match="gsm8k/test/0 was among the prompts"):
        autojudge_module.make_part("gsm8k", load_items(other), "other.jsonl", tmp_path / "old")


def test_two_files_that_share_ids_are_refused(command: Command, data: Path, tmp_path: Path) -> None:
    error = command("train", "judge", "--data", data, "--data", data, "-o", tmp_path, code=2)
    assert "'gsm8k/test/0' is taken already" in error


def test_labels_of_other_weights_are_not_taken_up(
    command: Command, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = trained / "labels.json"
    arguments = ("train", "judge", "--data", data, "-o", tmp_path / "again", "--labels", labels, *SMALL)
    digests = {"target_digest": "other", "draft_digest": None}
    with monkeypatch.context() as patch:
        patch.setattr(training, "weights_of", lambda decoder: digests)
        assert "labels of another target_digest" in command(*arguments, code=2)
    monkeypatch.setattr(training, "_mine", lambda *_: pytest.fail("mined again"))
    earlier = json.loads(labels.read_text())
    for name in digests:
        del earlier["settings"][name]
    old = tmp_path / "labels.json"
    old.write_text(json.dumps(earlier))
    command(*arguments[:6], "--labels", old, *SMALL)


def test_other_draft_weights_than_the_judges_are_noted(
    command: Command, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = judge_info(trained)
    facts = {name: info[name] for name in ("target", "draft", "tasks", "items", "prompts")}
    save_judge(load_judge(trained), tmp_path / "int8", {**facts, "draft_weights": "int8"})
    new, output = questions(tmp_path / "new.jsonl", range(20, 22)), tmp_path / "o"
    said: list[str] = []
    monkeypatch.setattr("dropmatch.cli.autojudge.typer.secho", lambda text, **_: said.append(text))
    command("bench", "autojudge", "--judge", tmp_path / "int8", "--gsm8k", new, "--num-gsm8k", "2", "-o", output,
            "--speed-items", "0", "-n", "4", "--thresholds", "q0.2", "--window", "4")  # fmt: skip
    assert any("--draft-weights int8, and reads those of own here" in text for text in said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Give at least one of --gsm8k, --mbpp and --ifeval"),
        (("--gsm8k", "DATA"), "--gsm8k needs a judge. Give --judge"),
        (("--mbpp", "DATA", "--judge", "JUDGE"), "--mbpp needs a judge. Give --code-judge"),
        (("--gsm8k", "DATA", "--judge", "JUDGE", "--thresholds", "q2"), "a quantile from q0 to q1"),
        (("--gsm8k", "DATA", "--judge", "JUDGE", "--p-drops", "1.5"), "--p-drops"),
        (("--gsm8k", "DATA", "--judge", "JUDGE", "--num-gsm8k", "99"), "has 2 items"),
        (("--gsm8k", "DATA", "--judge", "NOWHERE"), "NOWHERE does not exist"),
    ],
)
def test_bad_options_of_the_benchmark_are_named_before_models_load(
    command: Command,
    trained: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dropmatch.cli.options.load_decoder", lambda *_, **__: pytest.fail("models were loaded"))
    names = {"DATA": str(questions(tmp_path / "new.jsonl", range(20, 22))), "JUDGE": str(trained)}
    given = [names.get(option, option) for option in options]
    if "--num-gsm8k" not in given:
        given += ["--num-gsm8k", "2", "--num-mbpp", "2"]
    assert message in command("bench", "autojudge", *given, "-o", tmp_path / "out", code=2)


def test_a_judge_of_another_pair_is_refused_by_size(command: Command, tmp_path: Path) -> None:
    save_judge(judge_head(20), tmp_path / "judge", {})
    new = questions(tmp_path / "new.jsonl", range(20, 22))
    arguments = ("bench", "autojudge", "--judge", tmp_path / "judge", "--gsm8k", new, "--num-gsm8k", "2", *QUICK)
    error = command(*arguments, "-o", tmp_path / "out", code=2)
    assert "states of 20 numbers of its target, and this target gives 32" in error


def test_a_heads_own_training_prompts_are_known_only_where_it_says(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    head = judge_head(4)
    arrays = {"mean": head.mean.tolist(), "scale": head.scale.tolist(), "weights": head.weight.tolist(), "bias": 0.0}
    path.write_text(json.dumps({**arrays, "thresholds": list(head.thresholds)}))
    items = load_items(questions(tmp_path / "new.jsonl", range(2)))
    assert autojudge_module.make_part("gsm8k", items, "new.jsonl", path).info == {}
    save_judge(head, tmp_path / "judge", {"items": ["gsm8k/test/1"]})
    with pytest.raises(ConfigError, match="gsm8k/test/1 was among"):
        autojudge_module.make_part("gsm8k", items, "new.jsonl", tmp_path / "judge")


# --- the judge in other commands ---


def test_generate_and_compare_take_a_judge(command: Command, trained: Path, tmp_path: Path) -> None:
    rule = "dropmatch+judge(threshold=1.1)"
    out = command(
        "generate", "how fast is boat 30", "--judge", trained, "--rule", rule, "-L", "16", "-n", "34", "--json"
    )
    reasons = json.loads(out)["reasons"]
    assert "judge" in reasons
    assert "recovered" not in reasons
    error = command("generate", "how fast", "--rule", "judge", "-n", "4", code=2)
    assert "needs a trained head: --judge" in error
