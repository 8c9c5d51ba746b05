"""How well the closed form of dropout agrees with sampling, on real hidden states.

    python -m dropmatch.bench.closed_form --model smollm2-135m

Positions of a text where drafter and target name different tokens are judged both ways: by the closed form, and by K
sampled heads under many seeds. The drafter is --draft, or the target itself when it sees only the last --context
tokens. The output file gathers one entry per target. Nothing here says anything about the quality of decoded text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig
from dropmatch.core.calibrate import P_DROP_GRID, TARGET_RADIUS, choose_p_drop
from dropmatch.core.closed_form import head_radius
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.head_rows import HeadRows
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import PROBE_TEXT
from dropmatch.hf.head import HFHead
from dropmatch.hf.loading import load_model, load_tokenizer
from dropmatch.ops.closed_form import any_head_chance, win_chance
from dropmatch.ops.divergence import js_from_log_probs, log_probs
from dropmatch.provenance import collect

_NUM_RIVALS = 32  # as the rules have it
_CALIBRATION_STATES = 64  # positions that p_drop="auto" is compared over


@torch.inference_mode()
def measure(
    target: str,
    draft: str | None,
    text: str,
    *,
    context: int,
    count: int,
    num_paths: int,
    p_drops: Sequence[float],
    seeds: int,
) -> dict[str, Any]:
    """All figures of one target. count: most positions; seeds: samplings of num_paths heads at each."""
    ids = load_tokenizer(target)(text, return_tensors="pt")["input_ids"]
    model = load_model(target, dtype="float32", device="cpu")
    head = HFHead(model)
    hidden = _states(model, ids)[context - 1 :]
    if draft is None:
        windows = ids[0].unfold(0, context, 1)  # [T, context]
        drafted = head(torch.cat([_states(model, part, last=True) for part in windows.split(64)]))
    else:
        drafter = load_model(draft, dtype="float32", device="cpu")
        drafted = HFHead(drafter)(_states(drafter, ids))[context - 1 :, : head.vocab_size]
    plain = head(hidden)  # [T, V]
    open_ = (plain[:, : drafted.shape[-1]].argmax(-1) != drafted.argmax(-1)).nonzero()[:, 0]
    if len(open_) == 0:
        raise ConfigError("Drafter and target agree at every position of the text. Give a longer text.")
    chosen = open_[torch.linspace(0, len(open_) - 1, min(count, len(open_))).long()]
    drafted = torch.nn.functional.pad(
        drafted[chosen], (0, head.vocab_size - drafted.shape[-1]), value=torch.finfo(torch.float32).min
    )
    by_rate = {}
    for p_drop in p_drops:
        config = DropoutConfig(num_paths=num_paths, p_drop=p_drop)
        by_rate[str(p_drop)] = _at_rate(head, hidden[chosen], plain[chosen], drafted, config, seeds)
    states = hidden[torch.linspace(0, len(hidden) - 1, min(_CALIBRATION_STATES, len(hidden))).long()]
    return {
        "draft": draft or f"the target with {context} tokens of context",
        "positions": len(hidden),
        "disagreements": len(open_),
        "judged": len(chosen),
        "num_paths": num_paths,
        "samplings": seeds,
        "by_p_drop": by_rate,
        "auto_p_drop": _auto(head, states, num_paths),
        "provenance": collect(["python", "-m", "dropmatch.bench.closed_form", *sys.argv[1:]], device="cpu"),
    }


def _states(model: Any, ids: Tensor, *, last: bool = False) -> Tensor:
    """Hidden states of rows of ids: [S, d] of the first row, or with last=True [R, d] of each row's last token."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, -1] if last else hidden[0]


def _at_rate(
    head: HFHead, hidden: Tensor, plain: Tensor, drafted: Tensor, config: DropoutConfig, seeds: int
) -> dict[str, Any]:
    """hidden: [M, d]; plain, drafted: [M, V] logits."""
    tokens = drafted.argmax(-1)
    sampler, log_draft = MCDropoutHead(head, config), log_probs(drafted)
    votes, kept_head, kept_js, radii = [], [], [], []
    position = torch.arange(len(hidden))
    for seed in range(seeds):
        keys = torch.stack([torch.full_like(position, seed), torch.zeros_like(position), position], dim=-1)
        heads = sampler(
            hidden, keys, pick=lambda logits, _: logits.argmax(-1), with_js=True, draft_log_probs=log_draft.__getitem__
        )
        assert heads.radius is not None
        assert heads.js_draft is not None
        votes.append((heads.tokens == tokens[:, None]).sum(-1))
        kept_head.append(votes[-1] > 0)
        kept_js.append(heads.js_draft <= heads.radius)
        radii.append(heads.radius)
    rows, p_drop, K = HeadRows.of(head), sampler.p_drop, config.num_paths
    chance = _chance(rows, hidden, plain, tokens, p_drop)
    sampled = torch.stack(votes).sum(0) / (seeds * K)
    radius, sampled_radius = head_radius(rows, hidden, plain, K, p_drop), torch.stack(radii).mean(0)
    closed_js = js_from_log_probs(log_draft, log_probs(plain)) <= radius
    ratio = (radius / sampled_radius).sort().values
    return {
        "chance": {
            "mean_error": float((chance - sampled).abs().mean()),
            "worst_error": float((chance - sampled).abs().max()),
            "correlation": _correlation(chance, sampled),
            # of the sampled share itself, about 0.8 of its standard error
            "mean_error_of_sampling": float(0.8 * (sampled * (1 - sampled) / (seeds * K)).sqrt().mean()),
        },
        "radius": {
            "median_sampled": float(sampled_radius.median()),
            "ratio_median": float(ratio.median()),
            "ratio_p10": float(ratio[len(ratio) // 10]),
            "ratio_p90": float(ratio[len(ratio) * 9 // 10]),
            "log_correlation": _correlation(radius.clamp(min=1e-9).log(), sampled_radius.clamp(min=1e-9).log()),
        },
        "head": _agreement(any_head_chance(chance, K) >= 0.5, torch.stack(kept_head)),
        "js": _agreement(closed_js, torch.stack(kept_js)),
    }


def _chance(rows: HeadRows, hidden: Tensor, plain: Tensor, tokens: Tensor, p_drop: float) -> Tensor:
    """Chance [M] that one head produces each token."""
    rivals = plain.scatter(-1, tokens[:, None], -torch.inf).topk(_NUM_RIVALS, dim=-1).indices
    listed = torch.cat([tokens[:, None], rivals], dim=-1)
    products, scores = rows.products(hidden, listed), plain.gather(-1, listed)
    return win_chance(scores[:, :1] - scores[:, 1:], products[:, :1] - products[:, 1:], p_drop)


def _agreement(closed: Tensor, sampled: Tensor) -> dict[str, float]:
    """closed: [M] decisions; sampled: [S, M] decisions of each seed. Shares of positions."""
    share = sampled.float().mean(0)
    return {
        "kept_closed": float(closed.float().mean()),
        "kept_sampled": float(share.mean()),
        "closed_with_one_sampling": float(torch.where(closed, share, 1 - share).mean()),
        "two_samplings": float((share.square() + (1 - share).square()).mean()),
        "best_fixed_with_one_sampling": float(torch.maximum(share, 1 - share).mean()),
        "closed_with_majority_of_samplings": float((closed == (share > 0.5)).float().mean()),
    }


def _auto(head: HFHead, hidden: Tensor, num_paths: int) -> dict[str, Any]:
    """p_drop="auto" both ways over ordinary positions. hidden: [T, d]."""
    rows, plain = HeadRows.of(head), head(hidden)
    sampled = choose_p_drop(head, hidden, DropoutConfig(num_paths=num_paths))
    closed = {p: float(head_radius(rows, hidden, plain, num_paths, p).median()) for p in P_DROP_GRID}
    return {
        "sampled": sampled.p_drop,
        "closed": next((p for p, radius in closed.items() if radius <= TARGET_RADIUS), P_DROP_GRID[-1]),
        "median_radius_sampled": {str(p): radius for p, radius in sampled.median_radius.items()},
        "median_radius_closed": {str(p): radius for p, radius in closed.items()},
    }


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dropmatch.bench.closed_form", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", required=True, help="target: a folder, a packaged model or a hub id")
    parser.add_argument("--draft", help="drafter; without it the target itself with a short context")
    parser.add_argument("--text", type=Path, help="a text file (default: the built-in text of p_drop='auto')")
    parser.add_argument("--output", type=Path, default=Path("results/closed_form_agreement.json"))
    parser.add_argument("--context", type=int, default=12, help="tokens that the drafter sees (default 12)")
    parser.add_argument("--count", type=int, default=40, help="most positions judged (default 40)")
    parser.add_argument("--characters", type=int, default=1500, help="of a text file (default 1500)")
    parser.add_argument("--k", type=int, default=5, help="heads per sampling (default 5)")
    parser.add_argument("--p-drop", type=float, nargs="+", default=[0.05, 0.3])
    parser.add_argument("--seeds", type=int, default=30, help="samplings per position (default 30)")
    options = parser.parse_args()
    text = PROBE_TEXT if options.text is None else options.text.read_text(encoding="utf-8")[: options.characters]
    result = measure(
        options.model,
        options.draft,
        text,
        context=options.context,
        count=options.count,
        num_paths=options.k,
        p_drops=options.p_drop,
        seeds=options.seeds,
    )
    name = Path(options.model).name
    gathered = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    gathered = {"kind": "closed-form-agreement", "models": {**gathered.get("models", {}), name: result}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(gathered, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: {"by_p_drop": result["by_p_drop"], "auto_p_drop": result["auto_p_drop"]}}))


if __name__ == "__main__":
    main()
