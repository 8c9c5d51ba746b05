"""The measurement at the sizes of a 70B model, where there is a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dropmatch.bench.gpu import LARGE, run_gpu

pytestmark = pytest.mark.gpu
MOST_SECONDS = 240


def test_the_whole_measurement_takes_under_four_minutes(tmp_path: Path) -> None:
    started = time.monotonic()
    result = run_gpu(
        device=torch.device("cuda"),
        shapes=LARGE,
        seconds=90.0,
        max_new_tokens=128,
        is_small=False,
        output=tmp_path / "gpu.json",
    )
    assert time.monotonic() - started < MOST_SECONDS
    for rows in result["heads"].values():
        by_name = {row["way"]: row for row in rows}
        assert all(row["peak_bytes"] >= 0 for row in rows)
        assert by_name["shortlist with JS"]["ms_median"] < by_name["naive: K passes"]["ms_median"]
    assert result["model"]["rows"] is not None
