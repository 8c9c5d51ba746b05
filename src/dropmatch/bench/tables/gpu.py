"""Table of bench gpu: heads at the sizes of a 70B model, and a small model end to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropmatch.bench.figures import number
from dropmatch.bench.tables.markdown import Named, block, grid, machine, made_by, percent


def gpu(named: Named) -> str:
    """A part a number of inputs: milliseconds of each way beside the plain head and the naive way, peak memory."""
    result, name = named
    settings = result["settings"]
    head = ["way", "q", "ms", "10%-90%", "of the plain head", "of naive", "peak MiB"]
    rows = [_heads_row(row, q) for q, each in result["heads"].items() for row in each]
    repeats = [row["repeats"] for each in result["heads"].values() for row in each]
    text = block(
        grid(head, rows),
        f"Judging q drafted tokens at batch 1: hidden size {settings['hidden_size']:,}, vocabulary "
        f"{settings['vocabulary']:,}, K={settings['paths']}, p_drop={settings['p_drop']}, {settings['dtype']}, "
        f"shortlist of {settings['shortlist']:,} tokens, random weights; medians of {min(repeats)} to {max(repeats)} "
        f"interleaved repeats; memory beyond weights and inputs. Reading the head once takes at least "
        f"{result['floor_ms']:.3f} ms at {result['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s, as measured; "
        f"{machine(result)}. {made_by(result, name)}",
    )
    return text + "\n" + _model(result["model"], settings)


def _heads_row(row: Mapping[str, Any], q: str) -> list[str]:
    return [
        row["way"],
        q,
        f"{row['ms_median']:.3f}",
        f"{row['ms_q10']:.3f}-{row['ms_q90']:.3f}",
        f"{row['over_plain_head']:.2f}",
        percent(row["over_naive"]),
        "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
    ]


def _model(model: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    if model["rows"] is None:
        return f"{model['why_not']}\n"
    head = [
        "model end to end",
        "tokens/s",
        "tau",
        "head and rule / target",
        "draft, ms a round",
        "target",
        "head and rule",
    ]
    rows = [
        [
            row["way"],
            number(row["tokens_per_second"], ".1f"),
            number(row["tau"], ".2f"),
            percent(row["judge_over_target"]),
            *(number(1e3 * row[f"{part}_s"] / row["rounds"], ".2f") for part in ("draft", "target", "judge")),
        ]
        for row in model["rows"]
    ]
    shape = model["shape"]
    return block(
        grid(head, rows),
        f"A pair of random weights, {model['dtype'].removeprefix('torch.')}: {shape['layers']} layers of hidden size "
        f"{shape['hidden_size']:,}, drafted by the first {shape['draft_layers']}, vocabulary "
        f"{shape['vocab_size']:,}; one answer of {settings['max_new_tokens']} tokens each.",
    )
