"""Tables of time: bench quick, peers, linears and heads, analyze overhead (Table 4), bench batch (Table 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropmatch.bench.figures import number, over_base, spread
from dropmatch.bench.tables import published
from dropmatch.bench.tables.markdown import Named, block, grid, machine, made_by, options, pair, percent


def quick(named: Named) -> str:
    """Speed of our arms and of transformers' on the same prompts."""
    result, name = named
    settings = result["settings"]
    has_peers = any("over_generate" in row for row in result["summary"].values())
    ratios = ["over_generate", "over_plain", "over_lossless"][0 if has_peers else 1 :]
    titles = {"over_generate": "over `generate`", "over_plain": "over plain", "over_lossless": "over lossless"}
    head = [
        "",
        *(titles[ratio] for ratio in ratios),
        "decoding only, over lossless",
        "tau",
        "head and rule / target",
        "lossy tokens",
    ]
    rows = [
        [
            arm,
            *(spread(row.get(key)) for key in ratios),
            _decoding_over_lossless(result["arms"], arm),
            number(row.get("tau"), ".2f"),
            percent(row.get("judge_over_target")),
            f"{row['lossy_tokens']} of {row['emitted']}" if "lossy_tokens" in row else "",
        ]
        for arm, row in result["summary"].items()
    ]
    draft = f" with {settings['draft']}" if settings["draft"] else ""
    return block(
        grid(head, rows),
        f"Speed ratios within one run: median over {len(settings['items'])} prompts (minimum-maximum), "
        f"{settings['max_new_tokens']} tokens each, batch 1, whole calls with prefill; decoding "
        f"only is pooled over the prompts. "
        f"Pair: `{settings['target']}`{draft}; "
        f"{settings['dtype'].removeprefix('torch.')}, {options(settings)}; {machine(result)}. {made_by(result, name)}",
    )


def peers(named: Named) -> str:
    """Our lossless decoding beside that of other packages, on the same prompts."""
    result, name = named
    settings = result["settings"]
    head = ["", "over `generate`", "over plain", "over the fastest peer", "tau", "text as plain"]
    rows = [
        [
            f"**{row['way']}**" if row["is_ours"] else row["way"] + " (fastest)" * row["is_fastest_peer"],
            *(spread(row[key]) for key in ("over_generate", "over_plain", "over_fastest_peer")),
            number(row["tau"], ".2f"),
            f"{row['same_text']} of {row['prompts']}"
            + ("" if row["first_difference"] is None else f" ({row['first_difference']:g})"),
        ]
        for row in result["summary"]
    ]
    left_out = "".join(f" Left out: {reason.rstrip('.')}." for reason in settings["left_out"].values())
    return block(
        grid(head, rows),
        f"Speed ratios within one run: median over {len(settings['items'])} prompts (minimum-maximum), "
        f"{settings['max_new_tokens']} tokens each, greedy, batch 1, whole calls with prefill, {settings['repeats']} "
        "interleaved repeats; bold: ours. Text as plain: prompts whose tokens are all those of our plain decoding, and "
        f"in brackets the median place of the first one that differs on the others. Pair: {pair(settings)}; "
        f"{machine(result)}.{left_out} {made_by(result, name)}",
    )


def _decoding_over_lossless(arms: dict[str, Any], arm: str) -> str:
    """Tokens per second of decoding, prefill left out, pooled over the prompts, as a ratio at the same draft length."""
    base = arms.get(f"lossless L={arm.split('=')[-1]}")
    if base is None or "=" not in arm or not arms[arm]["stats"]:
        return ""
    rates = [a["stats"]["emitted"] / a["stats"]["time"]["decode_s"] for a in (arms[arm], base)]
    return f"{rates[0] / rates[1]:.2f}x"


def _shortlist_of(settings: Mapping[str, Any]) -> str:
    size, vocabulary = settings["shortlist_size"], settings["vocabulary"]
    return f"shortlist of {size:,} of {vocabulary:,} tokens, " if size < vocabulary else ""


def linears(named: Named) -> str:
    """The linear layers of a model by way and number of tokens."""
    result, name = named
    settings = result["settings"]
    ways = list(dict.fromkeys(way for row in result["rows"] for way in row["ways"]))
    rows = [
        [
            str(row["tokens"]),
            *(
                f"{way['ms_median']:.0f} ms, {spread(over_base(way))}" if (way := row["ways"].get(title)) else ""
                for title in ways
            ),
        ]
        for row in result["rows"]
    ]
    is_packed = any("over_packed" in way for row in result["rows"] for way in row["ways"].values())
    base = "packed weights" if is_packed else "torch (oneDNN packs no bfloat16 on this CPU)"
    without = f" Ours are missing: {settings['not_native']}." if settings["not_native"] else ""
    return block(
        grid(["tokens", *ways], rows),
        f"All {settings['layers']} linear layers of `{settings['model']}` one after the other, LM head included "
        f"({settings['weights'] / 1e9:.2f} billion weights, bfloat16 unless a column says int4), without what stands "
        f"between them: median milliseconds and, times {base}, median (minimum-maximum) of "
        f"{settings['repeats']} repeats side by side. Reading the weights once takes at least {result['floor_ms']:.0f} "
        f"ms at {result['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s, as measured; {machine(result)}.{without} "
        f"{made_by(result, name)}",
    )


def shortlist(named: Named) -> str:
    """Whether a shortlist of tokens decides as all tokens do, and what each costs."""
    result, name = named
    settings, row = result["settings"], result["summary"]
    head = [
        *("positions", "same by Eq. 6", "same majority", "same tokens of all heads", "median error of the radius"),
        "worst rank of a head's token",
        *("all tokens, ms", "shortlist, ms", "target forward, ms"),
    ]
    cells = [
        str(row["positions"]),
        *(percent(row[key]) for key in ("same_js", "same_majority", "same_tokens")),
        percent(row["median_radius_error"], 2),
        str(row.get("worst_rank", "")),
        *(number(row[key], ".1f") for key in ("full_ms_median", "shortlist_ms_median", "target_ms_mean")),
    ]
    return block(
        grid(head, [cells], left=0),
        f"{settings['shortlist_size']:,} tokens against all, under the same masks, wherever decoding asked the heads: "
        f"{len(settings['items'])} prompts, at most {settings['max_new_tokens']} tokens each, "
        f"L={settings['draft_length']}, {options(settings)}. Pair: {pair(settings)}; {machine(result)}. "
        "Rank: under the plain head, of the least likely token that any head produced. "
        f"Milliseconds a call, median; of the target's forward, mean. {made_by(result, name)}",
    )


def overhead(named: Named) -> str:
    """Table 4: what each way to judge costs beside one forward of the target."""
    result, name = named
    settings, rows = result["settings"], result["rows"]
    body = rows[0]
    whole = body["ms_median"] / body["share_of_forward"]
    lines = [["forward (body and plain head)", f"{whole:.3f}", "", "100.00%", "", "", *_published_overhead("forward")]]
    lines += [
        [
            row["part"],
            f"{row['ms_median']:.3f}",
            f"{row['ms_q10']:.3f}-{row['ms_q90']:.3f}",
            percent(row["share_of_forward"], 2),
            number(row["added_ms"], "+.3f"),
            number(None if row["added_share"] is None else 100 * row["added_share"], "+.2f"),
            *_published_overhead(row["part"]),
        ]
        for row in rows
    ]
    head = ["", "ms", "10%-90%", "of a forward", "ms over lossless", "points of a forward", "paper: ms", "of a forward"]
    skipped = "".join(f" Left out: {reason.rstrip('.')}." for reason in settings["skipped"])
    return block(
        grid(head, lines),
        f"Median of {settings['repeats']} interleaved repeats: one forward over {settings['inputs']} tokens behind "
        f"{settings['context']} cached ones at batch 1, and each way to judge all {settings['inputs']} positions, "
        f"which is the worst round. {options(settings)}, {_shortlist_of(settings)}"
        f"hidden size {settings['hidden_size']}. Pair: {pair(settings)}; "
        f"{machine(result)}.{skipped} Paper: Table 4, Llama-3.1-70B on GPUs. {made_by(result, name)}",
    )


def _published_overhead(part: str) -> list[str]:
    if part not in published.OVERHEAD:
        return ["", ""]
    ms, share = published.OVERHEAD[part]
    return [f"{ms:.2f}", f"{share:.2f}%"]


def batch(named: Named) -> str:
    """Table 5: throughput over lossless decoding by batch size."""
    result, name = named
    settings, rule = result["settings"], result["settings"]["rule"]
    rows = []
    for row in result["summary"]:
        base, mine = row["lossless"], row[rule]
        rows.append(
            [
                str(row["batch"]),
                str(row["waves"]),
                spread(row["decode_over_lossless"]),
                spread(row["whole_over_lossless"]),
                f"{base['tau']:.2f}, {mine['tau']:.2f}",
                f"{base['tokens_per_second']:.1f}, {mine['tokens_per_second']:.1f}",
                percent(mine["judge_over_target"]),
                percent(mine["lossy_share"]),
                f"{_gib(base['peak_bytes'])}, {_gib(mine['peak_bytes'])}" if mine["peak_bytes"] is not None else "",
                number(published.BATCH_SPEEDUP.get(row["batch"]), ".2f")
                + "x" * (row["batch"] in published.BATCH_SPEEDUP),
            ]
        )
    head = ["batch", "waves", "decoding only", "whole calls", "tau", "tokens/s", "head and rule / target"]
    head += ["lossy tokens", "peak GiB", "paper"]
    full = settings.get("out_of_memory_at")
    memory = "" if full is None else f" A batch of {full} did not fit into memory."
    return block(
        grid(head, rows),
        f"`{rule}` over lossless decoding: tokens per second, median over waves of prompts (minimum-maximum), methods "
        "in turn; tau, tokens/s and peak memory with weights as lossless, "
        f"`{rule}`. {len(settings['items'])} prompts, {settings['max_new_tokens']} tokens each, "
        f"repeats: {settings['repeats']}, L={settings['draft_length']}, {options(settings)}. Pair: {pair(settings)}; "
        f"{machine(result)}.{memory} Paper: Table 5, GSM8K, L=10. {made_by(result, name)}",
    )


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"
