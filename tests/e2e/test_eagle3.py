"""EAGLE-3 heads through the public doors: `load`, `train eagle3`, `generate`, `bench eagle3`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dropmatch
import eagle
import tiny
from dropmatch import SamplingParams
from dropmatch.bench.tables import table
from dropmatch.cli import main
from dropmatch.config import EngineConfig
from dropmatch.eagle3 import find
from dropmatch.eagle3.checkpoint import read_settings, read_tensors, save_head
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from dropmatch.hf import hub
from tabled import column, tables

PROMPT = "why is the sky blue"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp("models") / "target", eagle.target())


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(eagle.random_head(eagle.target().get_input_embeddings().weight.detach()), folder, dtype=torch.float32)
    return folder


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command line."""
    monkeypatch.setattr("sys.argv", ["dropmatch", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("options", [{}, {"tree_top_k": 1}, {"tree_tokens": 8, "tree_top_k": 3}])
def test_a_loaded_head_drafts_and_lossless_text_is_the_targets_own(
    target: str, head: Path, options: dict[str, Any]
) -> None:
    decoder = dropmatch.load(target, str(head), rule="exact", **options)
    assert isinstance(decoder.drafter, Eagle3Drafter)
    assert decoder.target.tap_layers == eagle.TAPS
    prompts = [PROMPT, "def area", "a train travels"]
    params = SamplingParams(max_new_tokens=20)
    drafted = decoder.run(prompts, params)
    plain = decoder.run(prompts, params, engine=decoder.engine(drafter=None))
    assert [g.tokens for g in drafted.generations] == [g.tokens for g in plain.generations]
    assert drafted.stats.requests.drafted > 0


def test_max_new_tokens_bounds_trees_too(target: str, head: Path) -> None:
    decoder = dropmatch.load(target, str(head), p_drop=0.05, draft_length=6)
    for count in (1, 2, 5):
        assert len(decoder.generate(PROMPT, max_new_tokens=count, eos_ids=()).tokens) == count


def test_two_calls_share_nothing_but_weights(target: str, head: Path) -> None:
    decoder = dropmatch.load(target, str(head), rule="exact")
    alone = decoder.generate(PROMPT, max_new_tokens=12).tokens
    first, second = decoder.stream(PROMPT, max_new_tokens=12), decoder.stream("def area", max_new_tokens=12)
    tokens: list[int] = []
    for chunk in first:
        tokens += chunk.tokens
        next(second, None)
    assert tokens == alone


def test_a_sampled_batch_with_a_head_equals_plain_sampling(target: str, head: Path) -> None:
    decoder = dropmatch.load(target, str(head), rule="exact")
    params = SamplingParams(max_new_tokens=15, temperature=0.9, top_p=0.9, seed=3)
    drafted = decoder.run([PROMPT, "def area"], params)
    plain = decoder.run([PROMPT, "def area"], params, engine=decoder.engine(drafter=None))
    assert [g.tokens for g in drafted.generations] == [g.tokens for g in plain.generations]


def test_options_of_trees_and_of_draft_models_are_not_mixed_up(target: str, head: Path) -> None:
    for options in ({"tree_tokens": 9}, {"tree_top_k": 2}, {"tap_offset": 1}):
        with pytest.raises(ConfigError, match="for EAGLE-3 heads"):
            dropmatch.load(target, "ngram", **options)
    with pytest.raises(ConfigError, match="is an EAGLE-3 head"):
        dropmatch.load(target, str(head), draft_weights="int4")
    with pytest.raises(ConfigError, match="tree_tokens=0"):
        dropmatch.load(target, str(head), tree_tokens=0)


def test_a_head_for_another_target_is_refused(head: Path, tmp_path: Path) -> None:
    small = tiny.save(tmp_path / "small", tiny.target())
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        dropmatch.load(small, str(head))
    wide = tiny.save(tmp_path / "wide", eagle.target(hidden_size=48))
    with pytest.raises(UnsupportedModelError, match=r"fc\.weight"):
        dropmatch.load(wide, str(head))


def test_the_packages_own_head_is_for_its_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="not for 'default'"):
        dropmatch.load("default", "eagle3")
    monkeypatch.setitem(find._SHIPPED_HEADS, "small", "no-such-folder")
    assert find.shipped_head("small") is None
    with pytest.raises(ModelNotFoundError, match="dropmatch train eagle3 --target small"):
        dropmatch.load("small", "eagle3")


def test_the_packages_own_head_is_small_whole_and_records_how_it_was_made() -> None:
    folder = find.shipped_head("small")
    assert folder is not None
    settings, tensors = read_settings(folder), read_tensors(folder)
    assert (settings.hidden_size, settings.vocab_size, settings.draft_vocab_size) == (576, 49152, 4096)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values() if tensor.is_floating_point())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16_000_000
    made = json.loads((folder / "training.json").read_text())
    assert made["target"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert made["held_out"]["chain_tau"] > 1.8
    assert made["provenance"]["command"].startswith("dropmatch train eagle3 --target small ")


def test_hub_ids_are_known_by_their_config(monkeypatch: pytest.MonkeyPatch, head: Path, tmp_path: Path) -> None:
    """The hub's local cache stands in for the hub: an official head there is often a pickle alone."""
    config = json.loads((head / "config.json").read_text())
    cached = tmp_path / "snapshot"
    cached.mkdir()
    (cached / "config.json").write_text(json.dumps(config))
    (cached / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setattr(
        hub.huggingface_hub,
        "try_to_load_from_cache",
        lambda hub_id, file: str(cached / file) if "head" in hub_id else None,
    )
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda hub_id, **options: str(cached))
    monkeypatch.setattr(hub, "why_unreachable", lambda hub_id: "there is no network")
    assert find.find_head("someone/a-head") == cached
    assert find.find_head("someone/a-model") is None
    assert find.find_head("qwen2.5-coder-0.5b") is None
    assert find.find_head(str(head)) == head
    assert find.find_head(str(tmp_path)) is None


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"p/{i}", "task": "gsm8k", "prompt": f"How many is {i} and 3?", "answer": "4"} for i in range(12)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_train_generate_and_bench_from_the_command_line(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    train = ("train", "eagle3", "--target", target, "--prompts", str(prompts), "--output", str(made), "-n", "12")
    sizes = ("--draft-vocab", "120", "--epochs", "2", "--batch-tokens", "128", "--batch", "4")
    assert run_cli(monkeypatch, *train, *sizes) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["output"] == str(made)
    assert "training: " in err  # progress is told where there is no terminal, too
    assert {path.name for path in made.iterdir()} == {"config.json", "model.safetensors", "training.json"}

    generate = ("generate", "--target", target, "--draft", str(made), "--rule", "dropmatch-naive", "--p-drop", "0.05")
    assert run_cli(monkeypatch, *generate, "--tree-tokens", "9", "--tree-top-k", "2", "-n", "10", "--json", PROMPT) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 10

    output = tmp_path / "bench.json"
    bench = ("bench", "eagle3", "--target", target, "--draft", str(made), "--data", str(prompts), "--num", "2")
    bench += ("--lengths", "2,3", "-n", "8", "--speed-items", "1", "--speed-tokens", "8", "--p-drop", "0.05")
    assert run_cli(monkeypatch, *bench, "--draft-weights", "int8", "--output", str(output)) == 2
    assert "Name one with --draft-model" in capsys.readouterr().err
    drafted = ("--draft-model", target, "--draft-weights", "int8")
    assert run_cli(monkeypatch, *bench, *drafted, "--output", str(output)) == 0
    assert "Far from the training text" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert [(row["rule"], row["draft_length"], row["paper_depth"]) for row in result["depths"]] == [
        ("lossless", 2, 1),
        ("lossless", 3, 2),
        ("dropmatch-naive", 2, 1),
        ("dropmatch-naive", 3, 2),
    ]
    assert all(row["over_plain"]["median"] > 0 for row in result["depths"])
    assert {(row["drafter"], row["domain"]) for row in result["domains"]} == {
        (drafter, domain) for drafter in ("eagle3", "ngram", "draft-model") for domain in ("own", "other")
    }
    own = [row["tau"] for row in result["domains"] if row["drafter"] == "draft-model"]
    assert min(own) >= 2  # the target drafts for itself, in 8 bits
    assert result["settings"]["draft_weights"] == "int8"
    assert result["provenance"]["torch"] == torch.__version__
    depths, domains = tables(table([(output, "bench.json")]))
    assert [cell.split(" ")[0] for cell in column(depths, "tau")] == [f"{row['tau']:.2f}" for row in result["depths"]]
    assert [cell.split(" ")[0] for cell in column(domains, "tau")] == [f"{row['tau']:.2f}" for row in result["domains"]]
    assert all((tmp_path / part).exists() for part in result["parts"])


def test_a_stopped_bench_goes_on_with_the_part_it_was_in(
    target: str, head: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dropmatch.bench import eagle3 as bench_module
    from dropmatch.bench.settings import CompareSettings
    from dropmatch.bench.tasks import load_items

    decoder = dropmatch.load(target, str(head), rule="exact", p_drop=0.05)
    items = load_items(prompts, 2)
    calls: list[str] = []
    whole = bench_module.run_compare

    def counting(*args: Any, output: Path, **options: Any) -> dict[str, Any]:
        if len(calls) == 2 and "stopped" not in calls:
            calls.append("stopped")
            raise KeyboardInterrupt
        calls.append(output.name)
        return whole(*args, output=output, **options)

    monkeypatch.setattr(bench_module, "run_compare", counting)

    def run() -> dict[str, Any]:
        return bench_module.run_eagle3(
            decoder,
            items,
            items,
            bench_module.Eagle3Bench([2]),
            CompareSettings(max_new_tokens=6),
            described={"target": target, "draft": str(head)},
            data=["p"],
            output=tmp_path / "bench.json",
        )

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / "bench.json").exists()
    run()
    assert calls == ["trees.json", "chain.json", "stopped", "eagle3-other.json", "ngram-own.json", "ngram-other.json"]


def test_answers_of_other_trees_are_not_taken_over(
    target: str, head: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A comparison with a head did not say how large its trees were."""
    output = tmp_path / "c.json"
    compare = ("compare", "--target", target, "--draft", str(head), "--data", str(prompts), "--num", "1", "-n", "6")
    options = ("--rules", "lossless", "--lengths", "2", "--speed-items", "0", "-o", str(output))
    assert run_cli(monkeypatch, *compare, *options) == 0
    assert json.loads(output.read_text())["settings"]["tree_tokens"] == 60
    monkeypatch.setattr("dropmatch.api.TREE_TOKENS", 9)
    capsys.readouterr()
    assert run_cli(monkeypatch, *compare, *options) == 2
    assert "tree_tokens: 60 then, 9 now" in capsys.readouterr().err


def test_the_bench_wants_a_head_and_a_lossy_rule(target: str, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch.bench.eagle3 import Eagle3Bench, run_eagle3

    with pytest.raises(ConfigError, match="set against lossless"):
        Eagle3Bench([2], "lossless").check()
    decoder = dropmatch.load(target, "ngram", rule="exact")
    with pytest.raises(ConfigError, match="the draft is none"):
        run_eagle3(
            decoder,
            [],
            [],
            Eagle3Bench([2]),
            None,
            described={},
            data=[],
            output=Path("never.json"),  # type: ignore[arg-type]
        )


def test_training_that_is_stopped_says_how_to_go_on_and_writes_no_head(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C showed a traceback of Python."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    command = ("train", "eagle3", "--target", target, "--prompts", str(prompts), "--output", str(tmp_path / "head"))
    small = ("-n", "8", "--draft-vocab", "120", "--epochs", "1", "--batch-tokens", "128", "--batch", "4")
    with monkeypatch.context() as stopped:
        stopped.setattr("dropmatch.training.eagle3.lookahead_losses", interrupted)
        assert run_cli(stopped, *command, *small) == 130
    said = capsys.readouterr().err
    assert "Stopped. Answers and checkpoints so far are kept. Give the same command again to go on." in said
    assert "Traceback" not in said
    assert not (tmp_path / "head").exists()
    assert run_cli(monkeypatch, *command, *small) == 0
    assert "answers (tokens)" not in capsys.readouterr().err  # they are there already


def test_an_output_folder_of_something_else_is_not_replaced(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "letter.txt").write_text("dear")
    command = ("train", "eagle3", "--target", target, "--prompts", str(prompts))
    assert run_cli(monkeypatch, *command, "--output", str(tmp_path / "precious")) == 2
    assert "holds no head" in capsys.readouterr().err
    assert (tmp_path / "precious" / "letter.txt").exists()


def test_nothing_but_a_head_is_ever_replaced(
    target: str, head: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A model's folder, which has a config.json too, was deleted as a whole at the end."""
    command = ("train", "eagle3", "--target", target, "--prompts", str(prompts))
    model = tmp_path / "model"
    shutil.copytree(target, model)
    made = tmp_path / "head"
    shutil.copytree(head, made)
    (made / "notes.txt").write_text("dear")
    monkeypatch.chdir(model)
    for output, said in ((model, "holds"), (Path("."), "holds"), (Path(".."), "holds"), (made, r"notes.txt")):
        assert run_cli(monkeypatch, *command, "--output", str(output)) == 2
        assert said in capsys.readouterr().err
    (made / "notes.txt").unlink()
    for output, work in ((tmp_path / "new", tmp_path / "new"), (made, made / "work")):
        assert run_cli(monkeypatch, *command, "--output", str(output), "--work", str(work)) == 2
        assert "which is replaced as a whole" in capsys.readouterr().err
    assert run_cli(monkeypatch, *command, "--output", str(tmp_path / "h"), "--work", str(prompts)) == 2
    assert "--work" in capsys.readouterr().err
    assert {path.name for path in model.iterdir()} == {path.name for path in Path(target).iterdir()}


def test_a_head_whose_writing_was_killed_is_written_by_the_next_run(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the killed run left of it was taken for a folder in the way."""
    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial" / "config.json").write_text("{")
    command = ("train", "eagle3", "--target", target, "--prompts", str(prompts), "--output", str(tmp_path / "made"))
    small = ("-n", "6", "--draft-vocab", "120", "--epochs", "1", "--batch-tokens", "128", "--batch", "4")
    assert run_cli(monkeypatch, *command, *small) == 0
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"made", "made-work"}
    assert run_cli(monkeypatch, *command, *small) == 0  # a head is replaced
    assert run_cli(monkeypatch, *command, *small, "--max-length", "9") == 2


def test_a_results_file_needs_an_ending_since_its_parts_go_beside_it(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Without one all was measured, and then the file could not be written over the folder of its parts."""
    bench = ("bench", "eagle3", "--data", str(prompts), "--output")
    assert run_cli(monkeypatch, *bench, str(tmp_path / "bench")) == 2
    assert "bench.json" in capsys.readouterr().err
    (tmp_path / "bench").write_text("mine")
    assert run_cli(monkeypatch, *bench, str(tmp_path / "bench.json")) == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_engines_draft_length_is_the_depth_of_trees(target: str, head: Path) -> None:
    decoder = dropmatch.load(target, str(head), rule="exact", draft_length=3)
    run = decoder.run([PROMPT], SamplingParams(max_new_tokens=12))
    assert len(run.stats.requests.drafted_at) <= 3
    deep = decoder.run(
        [PROMPT], SamplingParams(max_new_tokens=12), engine=decoder.engine(config=EngineConfig(draft_length=6))
    )
    assert 3 < len(deep.stats.requests.drafted_at) <= 6
