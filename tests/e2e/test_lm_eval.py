"""dropmatch inside lm-evaluation-harness: equal to its own Hugging Face model, and through its real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'dropmatch[eval]'")

import datasets
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import dropmatch
import dropmatch.cli
from dropmatch.errors import ConfigError, DropMatchError, UnknownNameError
from dropmatch.integrations import lm_eval as module
from dropmatch.integrations.lm_eval import DropMatchLM, cut, register, sampling_params
from dropmatch.integrations.local_tasks import write_tasks

# lm-eval and the libraries it loads warn on their own account
pytestmark = [pytest.mark.filterwarnings("ignore")]

ROUNDING = 1e-4  # float32 sums over some tens of log-probabilities, padded and batched differently
CONTEXTS = ("the harbour was", "def area(width, height):", "the sky is blue because", "a train", "men and nets")


@dataclass(frozen=True, slots=True)
class Harness:
    """A tiny pair on disk, and lm-eval's own model over the same target."""

    pair: tiny.TinyPair
    reference: HFLM

    def model(self, **options: Any) -> DropMatchLM:
        chosen = {"rule": "lossless", "dtype": "float32", "draft_length": 3, **options}
        arguments = {"target": str(self.pair.target), "draft": str(self.pair.draft), **chosen}
        return DropMatchLM.create_from_arg_obj(arguments, {"batch_size": arguments.pop("batch", 1), "device": "cpu"})


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    pair = tiny.save_pair(tmp_path_factory.mktemp("pair"))
    register()
    return Harness(pair, HFLM(str(pair.target), device="cpu", dtype="float32", batch_size=2))


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()


def request(kind: Any, *arguments: Any, doc_id: int = 0) -> Instance:
    return Instance(kind, {}, arguments, doc_id, ("task", doc_id, 1))


def generations(model: Any, options: Mapping[str, Any], contexts: tuple[str, ...] = CONTEXTS) -> list[str]:
    requests = [request("generate_until", text, dict(options), doc_id=i) for i, text in enumerate(contexts)]
    return model.generate_until(requests, disable_tqdm=True)


# -- likelihoods ----------------------------------------------------------------------------------------------------


def scored_pairs(harness: Harness) -> list[tuple[str, str]]:
    greedy = generations(harness.reference, {"until": [], "max_gen_toks": 4, "do_sample": False})
    pairs = [(context, f" {letter}") for context in CONTEXTS for letter in "ABCD"]
    pairs += list(zip(CONTEXTS, greedy, strict=True))
    return [*pairs, ("", "the last boat"), ("trailing space ", "moves"), ("the sky is", " blue because air scatters")]


@pytest.mark.parametrize("batch", [1, 4])
def test_loglikelihood_equals_the_harness_own_model(harness: Harness, batch: int) -> None:
    requests = [request("loglikelihood", *pair, doc_id=i) for i, pair in enumerate(scored_pairs(harness))]
    expected = harness.reference.loglikelihood(requests, disable_tqdm=True)
    got = harness.model(batch=batch).loglikelihood(requests, disable_tqdm=True)
    assert [value for value, _ in got] == pytest.approx([value for value, _ in expected], abs=ROUNDING)
    assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in expected]
    assert {is_greedy for _, is_greedy in got} == {True, False}


def test_rolling_loglikelihood_equals_the_harness_own_model_in_windows(harness: Harness) -> None:
    reference = HFLM(str(harness.pair.target), device="cpu", dtype="float32", max_length=16)
    requests = [request("loglikelihood_rolling", line) for line in (*tiny.LINES, "")]
    expected = reference.loglikelihood_rolling(requests, disable_tqdm=True)
    got = harness.model(max_length=16, batch=3).loglikelihood_rolling(requests, disable_tqdm=True)
    assert got == pytest.approx(expected, abs=ROUNDING)
    assert len(harness.reference.tok_encode(tiny.LINES[0])) > 17  # more than one window


def test_choices_of_one_context_share_a_forward(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    real = module.score_rows

    def counting(target: Any, batch: Any, wanted: Any) -> Any:
        rows.extend(batch)
        return real(target, batch, wanted)

    monkeypatch.setattr(module, "score_rows", counting)
    model = harness.model()
    requests = [request("loglikelihood", "Answer:", letter) for letter in "ABCD"]
    assert len({len(model.tok_encode(f"Answer:{letter}")) for letter in "ABCD"}) == 1
    values = model.loglikelihood(requests, disable_tqdm=True)
    assert rows == [tuple(model.tok_encode("Answer:"))]
    assert len(set(values)) == 4


# -- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("until", [[], [" and", "\n\n"], "e"])
def test_lossless_generation_equals_the_harness_own_greedy_one(harness: Harness, batch: int, until: Any) -> None:
    options = {"until": until, "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    expected = generations(harness.reference, options)
    assert generations(harness.model(batch=batch), options) == expected
    assert len(set(expected)) > 1


def test_a_prompt_without_room_is_cut_from_the_left_as_by_the_harness(harness: Harness) -> None:
    reference = HFLM(str(harness.pair.target), device="cpu", dtype="float32", max_length=24)
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    texts = (tiny.LINES[0],)
    assert generations(harness.model(max_length=24), options, texts) == generations(reference, options, texts)
    with pytest.raises(ConfigError, match="max_gen_toks=24 leaves no room"):
        generations(harness.model(max_length=24), {"until": [], "max_gen_toks": 24})


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_token_limit_counts(name: str) -> None:
    assert sampling_params({"until": ["x"], name: 7}, 256).max_new_tokens == 7


def test_generation_arguments_are_read_as_the_harness_means_them() -> None:
    greedy = sampling_params({"until": "stop", "do_sample": False, "temperature": 0.7, "top_p": 0.5}, 99)
    assert (greedy.temperature, greedy.top_p, greedy.stop, greedy.max_new_tokens) == (0.0, 1.0, ("stop",), 99)
    sampled = sampling_params(
        {"do_sample": True, "temperature": 0.7, "top_p": 0.5, "stop": ["a", ""], "until": ["b"]}, 9
    )
    assert (sampled.temperature, sampled.top_p, sampled.stop) == (0.7, 0.5, ("b", "a"))
    assert sampling_params({"temperature": 0.3}, 9).temperature == 0.3
    assert sampling_params({"do_sample": True}, 9).temperature == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "no beam search"),
        ({"max_gen_tokens": 4}, "Did you mean 'max_gen_toks'"),
        ({"do_sample": True, "temperature": 0.0}, "temperature above 0"),
        ({"until": 5}, "Give a string or a list of strings"),
        ({"do_sample": "false"}, "do_sample='false' is not allowed. Give true or false, without quotes"),
    ],
)
def test_generation_arguments_that_cannot_be_kept_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling_params(options, 256)


def test_a_special_token_stops_the_text_where_a_task_names_it(harness: Harness) -> None:
    """`<|im_end|>` in a task's `until` never shows in the text, since special tokens are left out of it."""
    model = harness.model()
    options = {"until": [], "max_gen_toks": 40}
    tokens = model.decoder.generate(CONTEXTS[0], chat=False, max_new_tokens=40).tokens
    words = model.tokenizer.convert_ids_to_tokens(tokens)
    place = next(i for i in range(3, 40) if words[i].isascii() and not any(words[i] in w for w in words[:i]))
    special = words[place]
    model.tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    before = model.tokenizer.decode(tokens[:place])
    assert generations(model, options, CONTEXTS[:1])[0].startswith(before)
    assert generations(model, options, CONTEXTS[:1]) != [before]
    assert generations(model, {**options, "until": [special]}, CONTEXTS[:1]) == [before]


def test_repeats_of_a_sampled_request_differ_and_a_second_run_does_not(harness: Harness) -> None:
    """Chance that two samples of 12 tokens agree: below 1e-6 at this temperature; the seed is fixed anyhow."""
    options = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12, "until": []}
    first = generations(harness.model(), options, ("the sky", "the sky", "a train"))
    assert first[0] != first[1]
    assert generations(harness.model(batch=3), options, ("the sky", "the sky", "a train")) == first
    assert generations(harness.model(), options, ("a train", "the sky", "the sky")) == [first[2], first[0], first[1]]


def test_the_side_file_counts_each_answer(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "new" / "stats.jsonl"
    model = harness.model(stats_file=str(file), rule="dropmatch", batch=2)
    generations(model, {"until": ["e"], "max_gen_toks": 16})
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(entry["doc_id"] for entry in entries) == list(range(len(CONTEXTS)))
    for entry in entries:
        assert entry["task"] == "task"
        assert entry["emitted"] == sum(entry["reasons"].values()) <= entry["accepted"] + entry["steps"]
        assert entry["seconds"] > 0
    info = model.get_model_info()["dropmatch"]
    assert info["statistics"]["rounds"] == sum(entry["steps"] for entry in entries)
    assert (info["rule"], info["draft_length"]) == ("dropmatch", 3)
    with pytest.raises(ConfigError, match="is there already"):
        harness.model(stats_file=str(file))


def test_stop_strings_cut_in_front_of_the_first() -> None:
    assert cut("one. two; three", (";", ".")) == "one"
    assert cut("one", ()) == "one"


# -- templates and arguments ----------------------------------------------------------------------------------------


def test_a_template_with_a_bos_token_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = tiny.SPECIAL[2]
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tiny.SPECIAL[2]} $A", special_tokens=[(tiny.SPECIAL[2], 2)]
    )
    tiny.target().save_pretrained(tmp_path / "bos")
    tokenizer.save_pretrained(tmp_path / "bos")
    model = DropMatchLM(dropmatch.load(str(tmp_path / "bos"), "none", dtype="float32"))
    text = model.apply_chat_template([{"role": "user", "content": "blue"}])
    assert text.startswith(tiny.SPECIAL[2])
    assert model.tok_encode(text)[:2].count(2) == 1
    assert model.tok_encode("blue")[0] == 2
    assert model.tok_encode("blue", add_special_tokens=False)[0] != 2
    without = DropMatchLM(model.decoder, add_bos_token=False)
    assert without.tok_encode("blue")[0] != 2
    assert model.prefix_token_id == 2


def test_a_reply_that_is_begun_goes_on_in_the_template(harness: Harness) -> None:
    model = harness.model()
    history = [{"role": "user", "content": "blue?"}, {"role": "assistant", "content": "Because"}]
    assert model.apply_chat_template(history, add_generation_prompt=False).endswith("Because")
    assert model.tokenizer_name == str(harness.pair.target).replace("/", "__")
    assert harness.model(chat_template_args={"x": 1}).tokenizer_name != model.tokenizer_name
    assert model.chat_template(True) == tiny.TEMPLATE


def test_a_missing_or_unwilling_template_is_named(harness: Harness, tmp_path: Path) -> None:
    plain = DropMatchLM(dropmatch.load(tiny.save(tmp_path / "plain", tiny.target(), chat=False), "none"))
    with pytest.raises(ConfigError, match="has no chat template"):
        plain.apply_chat_template([{"role": "user", "content": "blue?"}])
    model = harness.model()
    model.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigError, match="no system role"):
        model.apply_chat_template([{"role": "system", "content": "be brief"}])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"drafts": "x"}, UnknownNameError, "Unknown model argument 'drafts'. Did you mean 'draft'"),
        ({"pretrained": "x"}, ConfigError, "target=..."),
        ({"batch_size": 3}, ConfigError, "Give --batch_size alone"),
        ({"rule": "js-div"}, UnknownNameError, "js-div"),
        ({"max_gen_toks": 0}, ConfigError, "max_gen_toks=0"),
        ({"chat_template_args": "thinking"}, ConfigError, "Give a JSON object"),
    ],
)
def test_bad_model_arguments_are_named(
    harness: Harness, arguments: dict[str, Any], error: type[DropMatchError], message: str
) -> None:
    models = {"target": str(harness.pair.target), "draft": "none"}
    with pytest.raises(error, match=message):
        DropMatchLM.create_from_arg_obj({**models, **arguments}, {"batch_size": 1, "device": None})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there and is taken")
def test_the_harness_own_device_gives_way_to_the_cpu(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    models = {"target": str(harness.pair.target), "draft": "none"}
    model = DropMatchLM.create_from_arg_obj(models, {"batch_size": 1, "device": "cuda:0"})
    assert model.decoder.target.device.type == "cpu"
    assert "no cuda:0 here" in caplog.text
    with pytest.raises(ConfigError, match="There is no device 'cuda:1'"):
        DropMatchLM.create_from_arg_obj(models, {"batch_size": 1, "device": "cuda:1"})


def test_a_run_that_fails_leaves_no_side_file(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    for _ in range(2):
        with pytest.raises(ConfigError):
            generations(harness.model(stats_file=str(file)), {"max_gen_toks": 10**6})
    assert not file.exists()


@pytest.mark.parametrize(("given", "most", "rows"), [("auto", None, 32), ("auto:4", 8, 8), ("6", None, 6), (2, 8, 2)])
def test_the_batch_size_is_read_as_the_harness_gives_it(
    harness: Harness, given: int | str, most: int | None, rows: int
) -> None:
    assert DropMatchLM(harness.model().decoder, batch_size=given, max_batch_size=most).batch_size == rows


def test_rows_are_as_long_as_the_target_was_made_for_and_no_longer_than_the_models_hold(harness: Harness) -> None:
    decoder = harness.model().decoder
    assert DropMatchLM(decoder).max_length == harness.reference.max_length == 2048
    decoder.config = replace(decoder.config, max_length=64)
    assert DropMatchLM(decoder).max_length == 64
    with pytest.raises(ConfigError, match="more than the models hold"):
        DropMatchLM(decoder, max_length=65)


def test_arguments_come_as_one_string_too(harness: Harness) -> None:
    model = DropMatchLM.create_from_arg_string(f"target={harness.pair.target},draft=ngram,rule=js+majority,p_drop=0.2")
    assert model.decoder.dropout.p_drop == 0.2


# -- whole evaluations ----------------------------------------------------------------------------------------------


def write_task(folder: Path) -> Path:
    """A generation task with a few-shot example and a multiple-choice task, over local files."""
    folder.mkdir(parents=True)
    rows = [{"q": line, "a": line.split()[0], "i": i % 2} for i, line in enumerate(tiny.LINES)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\n    train: "
        f"{folder}/rows.jsonl\ntest_split: test\nfewshot_split: train\nfewshot_config:\n  sampler: first_n\n"
    )
    (folder / "words.yaml").write_text(
        f'task: words\n{head}output_type: generate_until\nnum_fewshot: 1\ndoc_to_text: "{{{{q}}}} ->"\n'
        'doc_to_target: "{{a}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  do_sample: false\n  max_gen_toks: 8\n'
        "metric_list:\n  - metric: exact_match\n"
    )
    (folder / "choices.yaml").write_text(
        f'task: choices\n{head}output_type: multiple_choice\nnum_fewshot: 0\ndoc_to_text: "{{{{q}}}}"\n'
        'doc_to_choice: [" boat", " men"]\ndoc_to_target: "{{i}}"\nmetric_list:\n  - metric: acc\n'
    )
    return folder


def test_whole_tasks_give_what_the_harness_own_model_gives(harness: Harness, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks")
    results = []
    for model in (harness.reference, harness.model(batch=4)):
        done = simple_evaluate(
            model=model,
            tasks=["words", "choices"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            bootstrap_iters=0,
        )
        assert done is not None
        samples = {task: [s["filtered_resps"] for s in rows] for task, rows in done["samples"].items()}
        results.append((samples["words"], [[pair[1] for pair in row] for row in samples["choices"]], done["results"]))
    (words, greedy, scores), ours = results
    assert ours[:2] == (words, greedy)
    assert ours[2]["choices"]["acc,none"] == scores["choices"]["acc,none"]


def test_answers_in_the_harness_cache_are_not_generated_again(harness: Harness, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks")
    results, rounds = [], []
    for _ in range(2):
        model = harness.model(batch=2)
        done = simple_evaluate(
            model=model,
            tasks=["words", "choices"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            use_cache=str(tmp_path / "cache"),
            bootstrap_iters=0,
        )
        assert done is not None
        results.append({task: [s["filtered_resps"] for s in rows] for task, rows in done["samples"].items()})
        rounds.append(model.stats.requests.rounds)
    assert results[0] == results[1]
    assert rounds[0] > rounds[1] == 0


def test_the_command_line_of_the_harness_runs_the_model(harness: Harness, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks")
    arguments = f"target={harness.pair.target},draft={harness.pair.draft},rule=dropmatch,p_drop=0.1,dtype=float32,k=3"
    command = (
        *(sys.executable, "-m", "dropmatch.cli", "lm-eval"),
        *("run", "--model", "dropmatch", "--tasks", "words,choices", "--include_path", str(folder)),
        *("--model_args", f"{arguments},stats_file={tmp_path}/stats.jsonl", "--device", "cpu", "--batch_size", "2"),
        *("--output_path", str(tmp_path / "out"), "--log_samples", "--apply_chat_template", "--limit", "3"),
    )
    home = {name: str(tmp_path / "cache") for name in ("HF_HOME", "HF_DATASETS_CACHE")}
    environment = {**os.environ, **home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "dropmatch (" in done.stdout
    assert len((tmp_path / "stats.jsonl").read_text().splitlines()) == 3
    (written,) = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(written.read_text())
    assert result["config"]["dropmatch"]["statistics"]["emitted"] > 0
    assert result["config"]["dropmatch"]["p_drop"] == 0.1
    assert result["results"].keys() == {"words", "choices"}


def test_a_wrong_model_argument_is_one_line_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path / "tasks") / "words.yaml"
    words = ["run", "--model", "dropmatch", "--model_args", "drafts=ngram", "--tasks", str(task)]
    monkeypatch.setattr(sys, "argv", ["dropmatch", "lm-eval", *words])
    # reading the thousands of tasks that lm-eval brings takes seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    with pytest.raises(SystemExit, match="2"):
        dropmatch.cli.main()
    assert "error: Unknown model argument 'drafts'" in capsys.readouterr().err


# -- local tasks ----------------------------------------------------------------------------------------------------


def test_task_files_are_finished_for_a_folder_of_data(tmp_path: Path) -> None:
    templates, data = tmp_path / "templates", tmp_path / "data"
    templates.mkdir()
    data.mkdir()
    with pytest.raises(ConfigError, match="no task files"):
        write_tasks(templates, data, tmp_path / "out")
    (templates / "a.yaml").write_text("data: DATA_DIR/a.jsonl\n")
    assert write_tasks(templates, data, tmp_path / "out") == ["a"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        write_tasks(templates, data, tmp_path / "file" / "out")
    assert (tmp_path / "out" / "a.yaml").read_text() == f"data: {data}/a.jsonl\n"
    assert str(data) in (tmp_path / "out" / "utils_local.py").read_text()
    with pytest.raises(ConfigError, match="not empty"):
        write_tasks(templates, data, tmp_path / "out")
    with pytest.raises(ConfigError, match="is no folder"):
        write_tasks(templates, tmp_path / "absent", tmp_path / "more")


@pytest.mark.parametrize("task", ["gsm8k_local", "mmlu_local", "ifeval_local"])
def test_the_shared_tasks_run(harness: Harness, shared_dir: Path, tmp_path: Path, task: str) -> None:
    if task == "ifeval_local":
        nltk = pytest.importorskip("nltk")
        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            pytest.skip("needs NLTK's punkt_tab data (NLTK_DATA)")
    write_tasks(shared_dir / "lm_eval_tasks", shared_dir / "data", tmp_path / "tasks")
    done = simple_evaluate(
        model=harness.model(batch=2),
        tasks=[task],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        limit=2,
        gen_kwargs=None if task == "mmlu_local" else "max_gen_toks=16",
        bootstrap_iters=0,
    )
    assert done is not None
    samples = done["samples"][task]
    assert len({sample["doc_id"] for sample in samples}) == 2
    if task == "mmlu_local":
        prompt = samples[0]["arguments"][0][0]
        assert prompt.count("Answer:") == 6
        assert prompt.count("about astronomy") == 1
        assert prompt.endswith("Answer:")
        assert len(samples[0]["filtered_resps"]) == 4
    if task == "gsm8k_local":
        assert samples[0]["arguments"][0][0].count("Question:") == 9
