"""The measurement at the sizes of a 70B model, run small on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from commands import Command, runner
from dropmatch.bench.analyses.chain import judge_chain
from dropmatch.bench.bandwidth import read_bandwidth
from dropmatch.bench.gpu import NAIVE, ONE_OPEN, PLAIN, SMALL, RandomHead, _ways, gpu_rows, naive_verdict
from dropmatch.bench.tables import table
from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import make_rule
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.reasons import Reason
from dropmatch.ops.random import dropout_masks
from tabled import column, tables

CPU = torch.device("cpu")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return runner(monkeypatch, capsys)


def test_the_small_run_measures_all_that_the_large_one_does(command: Command, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    arguments = ("--device", "cpu", "--small", "--seconds", "0", "-n", "12", "-o", output)
    done = command("bench", "gpu", *arguments)
    assert done.code == 0, done.err
    assert "naive" in done.out
    result = json.loads(output.read_text())
    assert list(result["heads"]) == ["6", "11"]
    for rows in result["heads"].values():
        assert [row["way"] for row in rows][:2] == [PLAIN, NAIVE]
        assert len(rows) == 9
        assert all(row["ms_q10"] <= row["ms_median"] <= row["ms_q90"] and row["repeats"] == 3 for row in rows)
        assert rows[0]["over_plain_head"] == rows[1]["over_naive"] == 1.0
    assert result["floor_ms"] > 0
    models = {row["way"]: row for row in result["model"]["rows"]}
    assert models["plain"]["tau"] == 1.0
    assert models["lossless L=5"]["tau"] > 1.5  # the draft model is of some use
    assert models["dropmatch L=5"]["tau"] >= models["lossless L=5"]["tau"]
    heads, model = tables(text := table([(output, "results/gpu.json")]))
    assert len(column(heads, "ms")) == 18
    assert column(model, "tau")[0] == "1.00"
    assert "hidden size 64" in text


@pytest.mark.parametrize("q", SMALL.inputs)
def test_every_way_has_the_worst_round_to_judge(q: int) -> None:
    """Drafts that Eq. 6 kept left Eq. 7 unasked, which in closed form is the dearer half."""
    ways = _ways(CPU, SMALL, q)
    for name in ("lossless", "heads with JS (Eq. 6, 7)", "shortlist with JS", "closed form of Eq. 6, 7"):
        codes = ways[name]()
        assert codes.shape == (1, q + 1)
        assert not ((codes == Reason.JS) | (codes == Reason.EXPECTED_JS) | (codes == Reason.EXACT)).any(), name
    for name, *_ in ONE_OPEN:
        assert int((ways[name]() == Reason.EXACT).sum()) == q - 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_3(command: Command, tmp_path: Path) -> None:
    done = command("bench", "gpu", "-o", tmp_path / "gpu.json")
    assert done.code == 3
    assert "No CUDA device was found" in done.err
    assert "--device cpu --small" in done.err
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--device", "cpu"), "Add --small"), (("--device", "gpux"), "'gpux' is no device")],
)
def test_devices_that_will_not_do_are_refused(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = command("bench", "gpu", *arguments, "-o", tmp_path / "gpu.json")
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("seed", range(6))
def test_the_naive_way_decides_as_the_rule_does_under_the_same_masks(seed: int) -> None:
    torch.manual_seed(seed)
    q, p_drop = 11, 0.1
    shapes = replace(SMALL, vocabulary=96)
    head = RandomHead(shapes, CPU)
    hidden = torch.randn(1, q, shapes.hidden_size)
    logits = head(hidden)
    draft = torch.cat([logits, logits[:, -1:]], dim=1) + 3 * torch.randn(1, q + 1, 96) * torch.rand(1, q + 1, 1)
    own = logits[0].argmax(-1)
    tokens = torch.where(torch.arange(q) % 2 == 0, own, (own + 1) % 96)
    keys = torch.tensor([[0, 0, 1 + i] for i in range(q)])
    masks = dropout_masks(keys, shapes.paths, shapes.hidden_size, p_drop)  # [q, K, d]
    kept = naive_verdict(head, hidden[0], tokens, draft[0, :q], masks.transpose(0, 1), p_drop)
    ensemble = MCDropoutHead(head, DropoutConfig(num_paths=shapes.paths, p_drop=p_drop))
    codes = judge_chain([0, *tokens.tolist()], hidden, logits, draft, ensemble, make_rule("js+majority"))
    votes = F.one_hot(ensemble.path_logits(hidden[0], masks).argmax(-1), 96).sum(1)  # [q, V]
    is_tied = (votes == votes.amax(-1, keepdim=True)).sum(-1) > 1  # which token then wins is our own choice
    assert ((codes[0, 1:] > 0) == kept)[~is_tied].all()
    assert int(is_tied.sum()) < q // 2
    assert 0 < int(kept.sum()) < q


def test_ratios_are_taken_repeat_by_repeat() -> None:
    times = {PLAIN: [1.0, 2.0, 4.0], NAIVE: [4.0, 8.0, 8.0], "other": [1.0, 1.0, 2.0]}
    rows = {row["way"]: row for row in gpu_rows(times, dict.fromkeys(times))}
    assert rows["other"]["over_plain_head"] == 0.5
    assert rows["other"]["over_naive"] == 0.25
    assert rows[NAIVE]["ms_median"] == 8.0


def test_bandwidth_is_that_of_memory() -> None:
    assert 1e8 < read_bandwidth(CPU, num_bytes=2**24) < 1e13
