"""Training data and training of EAGLE-3 heads, on a tiny target."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eagle
import tiny
from dropmatch.api import Decoder
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import as_rule
from dropmatch.eagle3.checkpoint import TargetFacts, load_head
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.errors import ConfigError, DataError, IntegrityError
from dropmatch.hf.model import HFModel
from dropmatch.training import distill as distill_module
from dropmatch.training import eagle3 as eagle3_module
from dropmatch.training.distill import DistillSettings, Example, distill, read_shards
from dropmatch.training.eagle3 import (
    TrainSettings,
    Truth,
    choose_vocabulary,
    collate,
    evaluate,
    lookahead_losses,
    merged,
    new_head,
    train_eagle3,
)
from dropmatch.training.lookahead import lookahead
from dropmatch.training.prompts import TrainingPrompt, read_prompts

DATA = DistillSettings(max_new_tokens=10, max_tokens=0, batch=4)
QUICK = TrainSettings(draft_vocab_size=200, epochs=2, batch_tokens=128, steps=2)
PROMPTS = [TrainingPrompt(str(i), "chat", f"{tiny.LINES[i % 4][: 20 + i]}") for i in range(12)]
HALF = 2e-3
"""Relative error of float16."""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    target = HFModel(eagle.target(), tap_layers=eagle.TAPS, probe=False)
    return Decoder(
        target,
        tiny.tokenizer(),
        None,
        rule=as_rule("exact"),
        dropout=DropoutConfig(),
        config=EngineConfig(max_length=2048),
    )


@pytest.fixture(scope="module")
def examples(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    return list(read_shards(distill(decoder, PROMPTS, tmp_path_factory.mktemp("data"), DATA, described={})))


def answers(examples: list[Example]) -> set[tuple[int, ...]]:
    return {tuple(example.ids.tolist()) for example in examples}


@contextmanager
def full_disk(folder: Path, limit: int) -> Iterator[None]:
    """No file takes more than so many bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- data -----------------------------------------------------------------------------------------------------------


def test_prompts_are_read_plain_and_gzipped_each_text_once(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "task": "chat", "prompt": "one"},
        {"id": "b", "task": "code", "turns": ["two", "three"]},
        {"id": "c", "task": "chat", "prompt": "one"},
        {"prompt": "four"},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "p.jsonl").write_text(text)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [TrainingPrompt("a", "chat", "one"), TrainingPrompt("b", "code", "two"), TrainingPrompt("4", "", "four")]
    assert read_prompts([tmp_path / "p.jsonl"]) == expected
    assert read_prompts([tmp_path / "p.jsonl.gz", tmp_path / "p.jsonl"]) == expected
    assert read_prompts([tmp_path / "p.jsonl"], exclude_tasks=["chat"]) == expected[1:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"prompt": 3}', "line 2: neither"),
        ("[" * 100_000, "line 2: nested too deep"),
        ('{"prompt": "\\ud800"}', "line 2: the prompt is no valid Unicode"),
    ],
)
def test_bad_prompts_are_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"p\.jsonl, {message}"):
        read_prompts([tmp_path / "p.jsonl"])


def test_prompt_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(DataError, match="is no file"):
        read_prompts([tmp_path])
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts([tmp_path / "bad.gz"])
    (tmp_path / "p.jsonl").write_text('{"task": "chat", "prompt": "x"}')
    with pytest.raises(DataError, match="No prompts"):
        read_prompts([tmp_path / "p.jsonl"], exclude_tasks=["chat"])


def test_examples_hold_the_targets_greedy_answers_and_its_states(decoder: Decoder, examples: list[Example]) -> None:
    prompts = {tuple(decoder.encode(prompt.text)): prompt for prompt in PROMPTS}
    assert len(examples) == len(prompts)
    for example in examples:
        ids, start = example.ids.tolist(), example.prompt_length
        prompt = prompts.pop(tuple(ids[:start]))
        assert ids[start:] == decoder.generate(prompt.text, max_new_tokens=10).tokens
        count = len(example.taps)
        assert count == len(ids) - 1
        with torch.no_grad():
            out = decoder.target.model.model(torch.tensor([ids]), output_hidden_states=True)
        taps = torch.cat([out.hidden_states[tap][0, :count] for tap in eagle.TAPS], dim=-1)
        assert torch.allclose(example.taps.float(), taps, rtol=HALF, atol=HALF)
        assert torch.allclose(example.hidden.float(), out.last_hidden_state[0, :count], rtol=HALF, atol=HALF)


def test_a_stopped_run_goes_on_with_the_prompts_that_are_left(
    decoder: Decoder, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropmatch.training.distill._ROWS_PER_SHARD", 3)
    whole = distill_module._answers

    def interrupted(*args: Any) -> Any:
        for count, answer in enumerate(whole(*args)):
            if count == 5:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(distill_module, "_answers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(decoder, PROMPTS, tmp_path, DATA, described={})
    first = sorted(tmp_path.glob("*.safetensors"))
    assert len(first) == 1
    before = first[0].stat().st_mtime_ns
    shards = distill(decoder, PROMPTS, tmp_path, DATA, described={})
    assert answers(list(read_shards(shards))) == answers(examples)
    assert len(list(read_shards(shards))) == len(examples)
    assert first[0].stat().st_mtime_ns == before
    again = distill(decoder, PROMPTS, tmp_path, DATA, described={})
    assert again == shards


def test_a_lost_shard_is_named_and_its_prompts_can_be_answered_again(
    decoder: Decoder, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropmatch.training.distill._ROWS_PER_SHARD", 5)
    shards = distill(decoder, PROMPTS, tmp_path, DATA, described={})
    assert len(shards) == 3
    shards[1].write_bytes(shards[1].read_bytes()[:500])
    with pytest.raises(IntegrityError, match=rf"{shards[1].name} cannot be read.*data\.journal"):
        list(read_shards(shards))
    shards[1].unlink()
    with pytest.raises(IntegrityError, match=shards[1].name):
        list(read_shards(shards))
    journal = tmp_path / "data.journal"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if shards[1].name not in line))
    again = distill(decoder, PROMPTS, tmp_path, DATA, described={})
    assert sorted(again) == shards
    assert answers(list(read_shards(again))) == answers(examples)
    assert len(list(read_shards(again))) == len(examples)


def test_a_shard_that_holds_something_else_is_named(decoder: Decoder, tmp_path: Path) -> None:
    (shard,) = distill(decoder, PROMPTS[:3], tmp_path, DATA, described={})
    tensors = load_file(shard)
    for change in ({"lengths": tensors["lengths"] + 1}, {"taps": tensors["taps"][1:].clone()}):
        save_file({**tensors, **change}, shard)
        with pytest.raises(IntegrityError, match=shard.name):
            list(read_shards([shard]))


def test_a_restart_throws_shards_away(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropmatch.training.distill._ROWS_PER_SHARD", 3)
    assert len(distill(decoder, PROMPTS, tmp_path, DATA, described={})) == 4
    kept = distill(decoder, PROMPTS[:2], tmp_path, DATA, described={"prompts": "others"}, restart=True)
    assert sorted(tmp_path.glob("shard-*")) == kept


def test_a_full_disk_is_told_and_half_a_shard_is_not_left(decoder: Decoder, tmp_path: Path) -> None:
    with full_disk(tmp_path, 2_000), pytest.raises(ConfigError, match=r"shard-00000.*cannot be written"):
        distill(decoder, PROMPTS, tmp_path, DATA, described={})
    assert not list(tmp_path.glob("shard-*"))
    assert len(list(read_shards(distill(decoder, PROMPTS, tmp_path, DATA, described={})))) == len(PROMPTS)


def test_answers_stop_at_the_token_budget(decoder: Decoder, tmp_path: Path) -> None:
    settings = DistillSettings(max_new_tokens=10, max_tokens=25, batch=2)
    made = list(read_shards(distill(decoder, PROMPTS, tmp_path, settings, described={})))
    count = sum(len(example.ids) - example.prompt_length for example in made)
    assert 25 <= count < 25 + 2 * 10


def test_long_prompts_are_left_out(decoder: Decoder, tmp_path: Path) -> None:
    lengths = sorted(len(decoder.encode(prompt.text)) for prompt in PROMPTS)
    settings = DistillSettings(max_new_tokens=4, max_tokens=0, max_prompt_tokens=lengths[5])
    made = list(read_shards(distill(decoder, PROMPTS, tmp_path, settings, described={})))
    assert sorted(example.prompt_length for example in made) == [n for n in lengths if n <= lengths[5]]


def test_data_of_other_settings_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    distill(decoder, PROMPTS[:2], tmp_path, DATA, described={"target": "a"})
    with pytest.raises(ConfigError, match="target"):
        distill(decoder, PROMPTS[:2], tmp_path, DATA, described={"target": "b"})


def test_states_that_half_precision_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = eagle.target()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e5)
    wild = Decoder(
        HFModel(model, tap_layers=eagle.TAPS, probe=False),
        tiny.tokenizer(),
        None,
        rule=as_rule("exact"),
        dropout=DropoutConfig(),
        config=EngineConfig(),
    )
    with pytest.raises(ConfigError, match="--feature-dtype"):
        distill(wild, PROMPTS[:2], tmp_path, DATA, described={})


# -- head and loss --------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_the_most_frequent_answer_tokens_and_then_the_lowest_ids() -> None:
    def example(ids: list[int]) -> Example:
        return Example(torch.tensor(ids), 2, torch.zeros(1, 1), torch.zeros(1, 1))

    made = [example([9, 9, 7, 5, 5]), example([9, 9, 7, 3])]  # the prompts' 9 does not count
    assert choose_vocabulary(made, 2, 12).tolist() == [5, 7]
    assert choose_vocabulary(made, 3, 12).tolist() == [3, 5, 7]
    assert choose_vocabulary(made, 5, 12).tolist() == [0, 1, 3, 5, 7]


def test_losses_are_cross_entropies_against_the_targets_own_distribution(
    decoder: Decoder, examples: list[Example]
) -> None:
    """The definition, row by row: which rows count, against which distribution, averaged over which rows."""
    head, scales = new_head(decoder, examples, QUICK)
    truth, steps = Truth(decoder, head.target_ids), 3
    batch = collate(examples[:3], scales, steps)
    head.requires_grad_(False)
    losses = [float(loss) for loss in lookahead_losses(head, truth, batch, steps)]
    expected = [0.0] * steps
    weight = decoder.target.model.lm_head.weight.detach()[head.target_ids]
    ranks = {int(token): rank for rank, token in enumerate(head.target_ids)}
    counted = 0
    for example in examples[:3]:
        ids = example.ids.tolist()
        outputs = lookahead(head, example.ids[None], (example.taps.float() * scales)[None], steps)
        for step, out in enumerate(outputs):
            for row in range(len(example.taps)):
                predicted = row + step + 2
                if (
                    predicted - 1 >= len(example.taps)
                    or predicted < example.prompt_length
                    or ids[predicted] not in ranks
                ):
                    continue
                target = (example.hidden[predicted - 1].float() @ weight.T).softmax(-1)
                expected[step] -= float((target * head.logits(out[0, row]).log_softmax(-1)).sum())
                counted += 1
    num_rows = sum(len(example.taps) for example in examples[:3])
    assert counted > 30
    assert losses == pytest.approx([value / num_rows for value in expected], rel=1e-4)


def test_the_merged_head_reads_taps_as_the_target_gives_them(decoder: Decoder, examples: list[Example]) -> None:
    head, scales = new_head(decoder, examples, QUICK)
    plain = merged(head, scales)
    taps = examples[0].taps.float()
    assert torch.allclose(plain.fuse(taps), head.fuse(taps * scales), rtol=1e-4, atol=1e-4)
    assert torch.equal(plain.lm_head.weight, head.lm_head.weight)


def test_a_head_that_knows_its_few_texts_drafts_them(decoder: Decoder, tmp_path: Path) -> None:
    """Trained on two short answers until it has them by heart, the head's chains are kept almost whole by the target,
    and the held-out estimate of tau agrees with real decoding of the same texts."""
    prompts = PROMPTS[:3]
    settings = TrainSettings(draft_vocab_size=60, epochs=150, batch_tokens=64, steps=3, learning_rate=3e-3)
    report = train_eagle3(
        decoder, prompts, tmp_path / "head", tmp_path / "work", target_name="t", data=DATA, settings=settings
    )
    assert report["loss"][-1] < 0.5 * report["loss"][0]  # what is left is the entropy of the target
    facts = TargetFacts.of(decoder.target)
    head = load_head(tmp_path / "head", facts, dtype=torch.float32, device=torch.device("cpu"))
    learnt = list(read_shards(sorted((tmp_path / "work").glob("*.safetensors"))))[1:]
    texts = {tuple(example.ids[: example.prompt_length].tolist()) for example in learnt}
    engine = decoder.engine(
        rule="exact",
        drafter=Eagle3Drafter(head, eagle.V, top_k=1),
        config=EngineConfig(draft_length=3),
    )
    run = decoder.run([list(text) for text in texts], SamplingParams(max_new_tokens=10), engine=engine)
    assert run.stats.requests.tau > 2.0
    scales = torch.ones(head.fc.in_features)
    estimate = evaluate(head, learnt, scales, settings)
    assert estimate["chance_by_step"][0] > 0.7


# -- the whole command ----------------------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def train(decoder: Decoder, folder: Path, **options: Any) -> dict[str, Any]:
    settings = options.pop("settings", QUICK)
    return train_eagle3(
        decoder, PROMPTS, folder / "head", folder / "work", target_name="t", data=DATA, settings=settings, **options
    )


def test_an_interrupted_training_ends_with_the_same_head(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(decoder, tmp_path / "whole")
    monkeypatch.setattr("dropmatch.training.eagle3._SAVE_EVERY", 2)
    steps: list[int] = []

    def interrupting(*args: Any) -> list[Tensor]:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return lookahead_losses(*args)

    with monkeypatch.context() as patch:
        patch.setattr("dropmatch.training.eagle3.lookahead_losses", interrupting)
        with pytest.raises(KeyboardInterrupt):
            train(decoder, tmp_path / "cut")
    assert not (tmp_path / "cut" / "head").exists()
    train(decoder, tmp_path / "cut")
    first, second = weights(tmp_path / "whole" / "head"), weights(tmp_path / "cut" / "head")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_checkpoints_of_other_settings_and_damaged_ones_are_refused(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropmatch.training.eagle3._SAVE_EVERY", 1)
    train(decoder, tmp_path)
    with pytest.raises(ConfigError, match="other settings"):
        train(decoder, tmp_path, settings=TrainSettings(draft_vocab_size=100, epochs=1))
    checkpoint = tmp_path / "work" / "training.pt"
    good = torch.load(checkpoint, weights_only=True)
    torch.save({**good, "head": {}}, tmp_path / "no-head.pt")
    for data in (
        b"nothing",
        b"",
        b"\x80\x02.",
        pickle.dumps([1], protocol=2),
        checkpoint.read_bytes()[:-3000],
        (tmp_path / "no-head.pt").read_bytes(),
    ):
        checkpoint.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"training\.pt cannot be read [^\n]*Remove it"):
            train(decoder, tmp_path)
    checkpoint.unlink()
    train(decoder, tmp_path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropmatch.training.eagle3._SAVE_EVERY", 2)
    train(decoder, tmp_path)
    checkpoint = tmp_path / "work" / "training.pt"
    before = checkpoint.read_bytes()
    monkeypatch.setattr("dropmatch.training.eagle3._SAVE_EVERY", 1)
    saved: list[int] = []
    whole = eagle3_module._Checkpoint.save

    def save(self: Any, *arguments: Any) -> None:
        saved.append(1)
        with full_disk(tmp_path, 10_000):
            whole(self, *arguments)

    (tmp_path / "work" / "training.pt").unlink()
    checkpoint.write_bytes(before)
    monkeypatch.setattr(eagle3_module._Checkpoint, "load", lambda *_: (0, []))
    monkeypatch.setattr(eagle3_module._Checkpoint, "save", save)
    with pytest.raises(ConfigError, match=r"training\.pt cannot be written"):
        train(decoder, tmp_path)
    assert saved
    assert checkpoint.read_bytes() == before
    assert not list((tmp_path / "work").glob("*.partial"))


def test_answers_that_begin_behind_the_longest_sequence_teach_nothing(decoder: Decoder, tmp_path: Path) -> None:
    """Their prompts fill the rows; the report's shares were 0 / 0 after the whole training."""
    with pytest.raises(DataError, match=r"0 answers begin within 3 tokens.*--max-length"):
        train(decoder, tmp_path, settings=replace(QUICK, max_length=3))
    longest = max(len(decoder.encode(prompt.text)) for prompt in PROMPTS)
    report = train(decoder, tmp_path / "b", settings=replace(QUICK, max_length=longest - 4))
    assert 2 <= report["data"]["answered"] < len(PROMPTS)
    assert 0 < report["vocabulary_coverage"] <= 1


def test_prompts_that_are_all_too_long_are_told_so(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--max-prompt-tokens"):
        train_eagle3(
            decoder,
            PROMPTS,
            tmp_path / "head",
            tmp_path / "work",
            target_name="t",
            data=replace(DATA, max_prompt_tokens=1),
            settings=QUICK,
        )


@pytest.mark.parametrize("is_long", [False, True])
def test_any_number_of_steps_can_be_trained(decoder: Decoder, tmp_path: Path, is_long: bool) -> None:
    """More steps than any answer has rows failed at the very end."""
    longest = sorted(len(decoder.encode(prompt.text)) for prompt in PROMPTS)[2] + 1
    settings = replace(QUICK, steps=longest + 2 if is_long else 1, epochs=1, max_length=longest)
    report = train(decoder, tmp_path, settings=settings)
    assert len(report["held_out"]["chance_by_step"]) == max(settings.steps, 5)
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_a_training_that_runs_away_is_stopped(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in ValueError, with everything done, and checkpoints of no numbers were kept."""
    monkeypatch.setattr("dropmatch.training.eagle3._SAVE_EVERY", 1)

    def losses(*arguments: Any) -> list[Tensor]:
        first, *others = lookahead_losses(*arguments)
        return [first * (float("nan") if (tmp_path / "work" / "training.pt").exists() else 1.0), *others]

    monkeypatch.setattr("dropmatch.training.eagle3.lookahead_losses", losses)
    with pytest.raises(ConfigError, match=r"update 2 .*--learning-rate"):
        train(decoder, tmp_path)
    state = torch.load(tmp_path / "work" / "training.pt", weights_only=True)
    assert state["step"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in state["head"].values())


def test_a_vocabulary_larger_than_the_targets_is_the_targets(decoder: Decoder, tmp_path: Path) -> None:
    train(decoder, tmp_path, settings=replace(QUICK, draft_vocab_size=10**6, epochs=1))
    assert "d2t" not in weights(tmp_path / "head")
    head = load_head(tmp_path / "head", TargetFacts.of(decoder.target), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(head.target_ids, torch.arange(eagle.V))


def test_the_report_says_what_was_done(decoder: Decoder, tmp_path: Path) -> None:
    train(decoder, tmp_path, family="speculators")
    report = json.loads((tmp_path / "head" / "training.json").read_text())
    assert report["settings"]["draft_vocab_size"] == 200
    assert report["data"]["answered"] == len(PROMPTS)
    assert 0 < report["vocabulary_coverage"] <= 1
    assert len(report["held_out"]["chance_by_step"]) == 5
    assert report["provenance"]["torch"] == torch.__version__
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "t"


@pytest.mark.parametrize("options", [{"epochs": 0}, {"learning_rate": 0.0}, {"steps": 0}])
def test_settings_that_train_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainSettings(**options)
