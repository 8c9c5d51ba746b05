"""The measurement of linear layers by every way to multiply them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from commands import Command, runner
from dropmatch.bench.figures import over_base
from dropmatch.bench.linears import NATIVE, PACKED, TORCH
from dropmatch.bench.tables import table
from dropmatch.hf.native import why_unavailable
from tabled import column, tables


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return runner(monkeypatch, capsys)


def test_every_way_is_timed_at_every_number_of_tokens(command: Command, tmp_path: Path) -> None:
    tiny.target().bfloat16().save_pretrained(tmp_path / "model")
    output = tmp_path / "linears.json"
    done = command("bench", "linears", "--target", tmp_path / "model", "--rows", "1,12", "--repeats", 2, "-o", output)
    assert done.code == 0, done.err
    result = json.loads(output.read_text())
    assert result["settings"]["layers"] == 2 * 7 + 1
    assert result["floor_ms"] == pytest.approx(
        2e3 * result["settings"]["weights"] / result["bandwidth_bytes_per_s"], rel=1e-9
    )
    assert [row["tokens"] for row in result["rows"]] == [1, 12]
    packs = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    expected = [TORCH, PACKED] if packs else [TORCH]
    if not why_unavailable() and not torch.cpu._is_amx_tile_supported():
        expected.append(NATIVE)
    base = PACKED if packs else TORCH
    for row in result["rows"]:
        assert list(row["ways"]) == expected  # no layer of this model fits int4
        assert over_base(row["ways"][base]) == {"median": 1.0, "min": 1.0, "max": 1.0}
        assert all(way["ms_median"] > 0 for way in row["ways"].values())
    (rendered,) = tables(table([(output, "results/linears.json")]))
    assert column(rendered, "tokens") == ["1", "12"]
    assert column(rendered, base)[0].endswith("1.00x (1.00-1.00)")


def test_a_model_without_bfloat16_is_refused(command: Command, tmp_path: Path) -> None:
    tiny.target().save_pretrained(tmp_path / "model")
    done = command("bench", "linears", "--target", tmp_path / "model", "-o", tmp_path / "linears.json")
    assert done.code == 2
    assert "has no bfloat16 linear layers on a CPU" in done.err
    assert not (tmp_path / "linears.json").exists()
