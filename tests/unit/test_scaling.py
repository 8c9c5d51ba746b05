"""How cost grows: prompts that are run once, vocabularies that are cut, the floor, and the measurement as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dropmatch
import tiny
from commands import Command, Done, runner
from dropmatch.bench.scaling import AXES, WAYS, Ladder, Point, _Bench, scaling_rows
from dropmatch.bench.tables import table
from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head_rows import HeadRows
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError
from dropmatch.hf.int4 import quantize_int4
from dropmatch.hf.model import HFModel
from dropmatch.hf.packed import PackedLinear, pack_linears
from dropmatch.hf.prefilled import PrefilledModel, Prompts
from dropmatch.hf.trimmed import TrimmedHead, trimmed
from dropmatch.hf.weights import body_bytes, head_bytes
from tabled import column, tables
from toys import run

PARAMS = SamplingParams(max_new_tokens=12, eos_ids=())
LONG = [(7 * i + 3) % 320 for i in range(40)]
BFLOAT16 = 0.05  # of logits of size about 2, multiplied in another order


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def model() -> HFModel:
    return HFModel(tiny.target())


# -- prompts that are run once --------------------------------------------------------------------------------------


def _tokens(target: HFModel, prompts: list[list[int]], draft: HFModel | None = None) -> list[list[int]]:
    drafter = None if draft is None else DraftModelDrafter(draft, 320)
    engine = SpeculativeEngine(target, drafter, rule="exact", config=EngineConfig(draft_length=3))
    return [result.tokens for result in run(engine, prompts, PARAMS)]


def test_a_prompt_and_its_beginnings_are_run_once_and_decode_as_ever(model: HFModel) -> None:
    ran: list[int] = []
    draft = HFModel(tiny.agreeing(model.model))
    hook = model.anatomy.body.register_forward_pre_hook(
        lambda _, args, kwargs: ran.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    known, drafted = Prompts(), Prompts()
    try:
        for ids in (LONG, LONG[:25], LONG, LONG[:9]):
            decoded = _tokens(PrefilledModel(model, known), [ids], PrefilledModel(draft, drafted))
            assert [count for count in ran if count > 4] == [len(LONG) - 1]
            prefills = ran.copy()
            assert decoded == _tokens(HFModel(model.model, probe=False), [ids])
            ran[:] = prefills
    finally:
        hook.remove()


def test_rows_of_a_batch_come_from_their_own_prompts(model: HFModel) -> None:
    prompts = [LONG[:20], LONG[1:21], LONG[5:12]]
    alone = [_tokens(HFModel(model.model, probe=False), [ids])[0] for ids in prompts]
    known = Prompts()
    for _ in range(2):
        assert _tokens(PrefilledModel(model, known), prompts) == alone


# -- vocabularies that are cut --------------------------------------------------------------------------------------


def _with_bias(model: Any) -> Any:
    model.lm_head.bias = nn.Parameter(torch.randn(320))
    return model


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_trimmed_head_gives_the_first_logits(with_bias: bool) -> None:
    full = HFModel(_with_bias(tiny.target()) if with_bias else tiny.target(), probe=False)
    cut = trimmed(full, 100)
    hidden = torch.randn(3, 32)
    assert torch.equal(cut.head(hidden), full.head(hidden)[:, :100]) or torch.allclose(
        cut.head(hidden), full.head(hidden)[:, :100], atol=1e-6
    )
    assert cut.vocab_size == cut.head.vocab_size == 100
    assert HeadRows.of(cut.head).weight.data_ptr() == full.head.weight.data_ptr()  # no copy
    assert all(token < 100 for token in _tokens(cut, [LONG[:5]])[0]) or max(LONG[:5]) >= 100


def test_a_packed_head_stays_packed() -> None:
    model = tiny.target().to(torch.bfloat16)
    expected = HFModel(model, probe=False).head(torch.ones(2, 32, dtype=torch.bfloat16))[:, :64]
    if not pack_linears(model):
        pytest.skip("needs a torch with oneDNN")
    head = TrimmedHead(HFModel(model, probe=False), 64)
    assert isinstance(head._module, PackedLinear)
    assert torch.allclose(head(torch.ones(2, 32, dtype=torch.bfloat16)), expected, atol=BFLOAT16)


def test_heads_without_rows_and_sizes_that_do_not_fit_are_refused(model: HFModel) -> None:
    with pytest.raises(ConfigError, match="the model has 320 tokens"):
        TrimmedHead(model, 321)
    quantised = tiny.target().to(torch.bfloat16)
    quantize_int4(quantised)
    with pytest.raises(ConfigError, match="shows none"):
        TrimmedHead(HFModel(quantised, probe=False), 64)


# -- the floor ------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_all_weights_but_the_embedding() -> None:
    model = HFModel(tiny.target())
    parameters = dict(model.model.named_parameters())
    every = 4 * sum(parameter.numel() for parameter in parameters.values())
    head = 4 * parameters["lm_head.weight"].numel()
    assert head_bytes(model) == head == 4 * 320 * 32
    assert body_bytes(model) == every - head - 4 * parameters["model.embed_tokens.weight"].numel()
    assert head_bytes(trimmed(model, 160)) == head // 2


def test_replaced_layers_count_what_they_multiply_with() -> None:
    plain, packed, rounded = (HFModel(tiny.target().to(torch.bfloat16), probe=False) for _ in range(3))
    if not pack_linears(packed.model):
        pytest.skip("needs a torch with oneDNN")
    quantize_int4(rounded.model)
    before = body_bytes(plain)
    assert body_bytes(HFModel(packed.model, probe=False)) == before
    assert head_bytes(HFModel(packed.model, probe=False)) == head_bytes(plain)
    assert body_bytes(rounded) == before  # none of these layers fits
    # 4 bits a weight, and 4 bytes for each group of 32
    assert head_bytes(rounded) == 320 * 32 // 2 + 320 * 4 < head_bytes(plain)


def test_time_and_floor_are_per_token() -> None:
    common = {"axis": "k", "value": 5, "way": "dropmatch", "steps": 4, "rounds": 4, "emitted": 10, "accepted": 6}
    common |= {"positions_asked": 2, "bytes_a_step": 5_000_000, "draft_s": 0.1, "judge_s": 0.0, "rest_s": 0.0}
    entries = [common | {"repeat": i, "target_s": seconds} for i, seconds in enumerate((0.1, 0.3))]
    (row,) = scaling_rows(entries, 1e9)
    assert (row["ms_a_token"], row["ms_min"], row["ms_max"]) == pytest.approx((30.0, 20.0, 40.0))
    assert row["floor_ms"] == pytest.approx(2.0)  # 5 ms a step, 2.5 tokens a step
    assert row["over_floor"] == pytest.approx(15.0)
    assert row["tau"] == 2.5
    assert row["target_ms_a_step"] == pytest.approx(50.0)


# -- the command ----------------------------------------------------------------------------------------------------

SIZES = ("--contexts", "8,40", "--vocabularies", "128,320", "--paths", "1,4", "--lengths", "2,4", "--batches", "1,3")
VALUES = {"context": [8, 40], "vocabulary": [128, 320], "k": [1, 4], "length": [2, 4], "batch": [1, 3]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def scaling(command: Command, pair: tiny.TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`dropmatch bench scaling` on the tiny pair, with a small block to measure the bandwidth."""
    monkeypatch.setattr("dropmatch.bench.scaling.read_bandwidth", lambda device, num_bytes: 1e9)

    def run_it(*arguments: str | Path) -> Done:
        models = ("--target", pair.target, "--draft", pair.draft, "--p-drop", "0.1", "--context", "8")
        output = ("-o", tmp_path / "scaling.json", "-n", "6")
        return command("bench", "scaling", *models, *output, *arguments)

    return run_it


def test_every_point_is_measured_and_drawn(scaling: Command, tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    done = scaling(*SIZES, "--repeats", "1", "--plots", plots)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "scaling.json").read_text())
    expected = [(axis, value, way) for axis in AXES for way in WAYS[axis] for value in VALUES[axis]]
    assert [(row["axis"], row["value"], row["way"]) for row in result["rows"]] == expected
    rows = {(row["axis"], row["value"], row["way"]): row for row in result["rows"]}
    assert all(row["passes"] == 1 and row["over_floor"] > 0 for row in rows.values())
    assert result["settings"]["left_out"] == []
    for value in VALUES["context"]:
        assert rows["context", value, "plain"]["tau"] == 1.0
        assert rows["context", value, "lossless"]["tau"] > 1.2
    # the floor: a smaller head, and no more weights for more rows
    small, large = (rows["vocabulary", value, "plain"]["bytes_a_step"] for value in VALUES["vocabulary"])
    assert large - small == 4 * (320 - 128) * 32
    one, three = (rows["batch", value, "plain"] for value in VALUES["batch"])
    assert one["bytes_a_step"] == three["bytes_a_step"]
    assert three["floor_ms"] == pytest.approx(one["floor_ms"] / 3)
    assert rows["k", 4, "dropmatch-paper"]["positions_asked"] > rows["k", 4, "dropmatch"]["positions_asked"]
    assert {path.name for path in plots.iterdir()} == {f"scaling-{axis}.svg" for axis in AXES}
    picture = (plots / "scaling-context.svg").read_text()
    assert "tokens of context" in picture
    assert "lossless: floor" in picture
    shown = tables(table([(tmp_path / "scaling.json", "results/scaling.json")]))
    assert [len(rows) - 1 for rows in shown] == [6, 6, 4, 4, 6]
    (alone,) = tables(table([(tmp_path / "scaling.json", "results/scaling.json")], "k"))
    assert column(alone, "K") == ["1", "4", "1", "4"]


def test_a_run_out_of_time_says_what_is_missing_and_can_be_drawn(scaling: Command, tmp_path: Path) -> None:
    done = scaling("--contexts", "8", "--vocabularies", "none", "--paths", "none", "--lengths", "none",
                   "--batches", "none", "--minutes", "0")  # fmt: skip
    assert done.code == 0, done.err
    assert "Left out, for lack of time: plain at context 8, lossless at context 8" in done.out.replace("\n", " ")
    done = scaling("--redraw", "--plots", tmp_path / "plots")
    assert done.code == 0
    assert "0 pictures" in done.err


def test_drafts_without_a_model_cost_no_weights(scaling: Command, tmp_path: Path) -> None:
    none = [part for name in ("vocabularies", "paths", "lengths", "batches") for part in (f"--{name}", "none")]
    done = scaling("--draft", "ngram", "--contexts", "8", *none, "--repeats", "1")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert len({row["bytes_a_step"] for row in rows}) == 1
    assert scaling("--draft", "random", "--contexts", "8", *none).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", "8,x"), "--contexts='8,x' is not allowed"),
        (("--dtype", "bfloat16", "--draft-weights", "int4"), "or leave this axis out: --vocabularies none"),
        (("--vocabularies", "400"), "A vocabulary of 400 was asked for; the target has 320 tokens"),
        (("--redraw",), "Name their folder with --plots"),
        (("--plots", "p", "--format", "gif"), "Format 'gif' is not allowed"),
    ],
)
def test_bad_options_are_refused(scaling: Command, arguments: tuple[str, ...], message: str) -> None:
    done = scaling(*arguments)
    assert done.code == 2
    assert message in done.err.replace("\n", " ")


def test_a_stopped_run_goes_on_and_the_vocabulary_is_cut_to_parts(
    scaling: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [part for name in ("contexts", "paths", "lengths", "batches") for part in (f"--{name}", "none")]
    measure, values = _Bench.measure, []

    def stop_at_the_fifth(bench: _Bench, point: Point) -> Any:
        values.append(point.vocabulary)
        if len(values) == 5:
            raise KeyboardInterrupt
        return measure(bench, point)

    monkeypatch.setattr(_Bench, "measure", stop_at_the_fifth)
    assert scaling(*arguments, "--repeats", "1").code == 130
    assert scaling(*arguments, "--repeats", "1").code == 0
    assert values == [40, 40, 40, 80, 80, 80, 80, 160, 160, 160, 320, 320, 320]
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [row["value"] for row in rows if row["way"] == "plain"] == [40, 80, 160, 320]


def test_axes_may_be_left_out_but_not_all(scaling: Command) -> None:
    none = [
        part for name in ("contexts", "vocabularies", "paths", "lengths", "batches") for part in (f"--{name}", "none")
    ]
    done = scaling(*none)
    assert done.code == 2
    assert "Every axis is none" in done.err


def test_contexts_that_the_models_cannot_hold_are_refused(pair: tiny.TinyPair) -> None:
    decoder = dropmatch.load(str(pair.target), str(pair.draft), p_drop=0.1)
    decoder.config = replace(decoder.config, max_length=64)
    with pytest.raises(ConfigError, match="need 67 positions; the models have 64"):
        _Bench(decoder, Ladder({"context": [8, 56]}, context=8), "a text", max_new_tokens=6)


def test_points_differ_from_the_base_in_one_value() -> None:
    points = list(Ladder({"k": [1, 7], "batch": [2]}, context=9, k=3, length=4).points())
    assert {(p.context, p.length) for _, _, p in points} == {(9, 4)}
    assert {(p.k, p.batch) for axis, _, p in points if axis == "k"} == {(1, 1), (7, 1)}
    assert {(p.k, p.batch) for axis, _, p in points if axis == "batch"} == {(3, 2)}
