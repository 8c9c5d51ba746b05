"""What single dropout heads are worth: Tables 1, 2 and 3 of the DropMatch paper on any pair.

accuracy: each head decodes alone, as if it were the model, and its answers are graded beside the target's and the
drafter's. votes: all heads are asked at every position of the target's own answers, in one forward a text, and the size
of the largest group that agrees is counted. divergence: decoding by the paper's rule, the divergences of Eq. 6 by the
reason a drafted token was kept for.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.analyses.decoding import (
    ANSWER,
    DRAFT,
    TARGET,
    DecodingSettings,
    Job,
    check_single_turn,
    decode_jobs,
    draft_engine,
    encode,
    fingerprint,
    say_answers_taken_over,
    target_engine,
)
from dropmatch.bench.analyses.show import console
from dropmatch.bench.analyses.single_head import Head
from dropmatch.bench.intervals import paired_difference, wilson
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.settings import NEWER, weights_of
from dropmatch.bench.tasks import Item, score_all
from dropmatch.core.acceptance import make_rule
from dropmatch.core.engine import Round
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError, UnknownNameError
from dropmatch.hf.model import HFModel
from dropmatch.provenance import collect

PARTS = ("accuracy", "votes", "divergence")
RULE = "dropmatch-paper"  # Eq. 6, else Eq. 7: both are asked at every drafted token
_BLOCK = 32  # positions whose K x V logits are held at once
_KINDS = {int(Reason.JS): "js", int(Reason.MAJORITY): "majority", int(Reason.REJECTED): "rejected"}


def run_heads_analysis(
    decoder: Decoder,
    items: Sequence[Item],
    *,
    rates: Sequence[float],
    parts: Sequence[str] = PARTS,
    settings: DecodingSettings,
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Run the parts asked for and write the results file. Returns what was written.

    rates: drop probabilities of the single heads; the other parts take the decoder's own. described: further settings
    for the file. An interrupt leaves a journal, from which the same call goes on. Raises ConfigError, DataError.
    """
    for part in parts:
        if part not in PARTS:
            raise UnknownNameError("part", part, PARTS)
    check_single_turn(items)
    if "accuracy" in parts:
        _check_gradable(items)
    provenance = collect(device=str(decoder.target.device))
    written = {
        **described,
        "parts": list(parts),
        "rates": list(rates),
        "k": decoder.dropout.num_paths,
        "p_drop": decoder.dropout.p_drop,
        "dtype": str(decoder.target.dtype),
        **asdict(settings),
        "items": [item.id for item in items],
        "prompts": fingerprint(items),
        **weights_of(decoder),
    }
    with Journal(output, written, restart=restart, newer=NEWER) as journal:
        say_answers_taken_over(journal)
        _decode(decoder, items, rates if "accuracy" in parts else (), parts, settings, journal)
        if "votes" in parts:
            _vote(decoder, items, settings, journal)
        if "divergence" in parts:
            _diverge(decoder, items, settings, journal)
        result: dict[str, Any] = {"kind": "analyze-heads", "settings": written}
        texts = {(e["arm"], e["item"]): e for e in journal.entries if "arm" in e and e["arm"] != RULE}
        names = [TARGET, DRAFT, *(Head(path, rate).name for rate in rates for path in range(decoder.dropout.num_paths))]
        arms = [name for name in names if (name, items[0].id) in texts]  # a drafter without a model has no row
        if "accuracy" in parts:
            result["accuracy"] = accuracy_rows(items, arms, texts)
            result["answers"] = {arm: {item.id: texts[arm, item.id]["text"] for item in items} for arm in arms}
        if "votes" in parts:
            result["votes"] = vote_rows([e for e in journal.entries if "votes" in e], decoder.dropout.num_paths)
        if "divergence" in parts:
            result["divergence"] = divergence_rows([e for e in journal.entries if "divergence" in e])
        result["provenance"] = provenance
        write_result(result, output)
        journal.remove()
    return result


def _check_gradable(items: Sequence[Item]) -> None:
    """Raise before hours of decoding, not after them."""
    scores = score_all(items, [[""] for _ in items])
    bare = next((item.id for item, score in zip(items, scores, strict=True) if score.correct is None), None)
    if bare is not None:
        raise ConfigError(
            f"{bare} has no ground truth, so that the accuracy of a head cannot be told. Give a data set with answers, "
            "such as humaneval or gsm8k, or ask for --parts votes,divergence."
        )


# -- Table 1 --------------------------------------------------------------------------------------------------------


def _decode(
    decoder: Decoder,
    items: Sequence[Item],
    rates: Sequence[float],
    parts: Sequence[str],
    settings: DecodingSettings,
    journal: Journal,
) -> None:
    """Texts of the target (which votes need too), of the drafter alone, and of every head at every rate."""
    if not {"accuracy", "votes"} & set(parts):
        return
    done = {(e["arm"], e["item"]) for e in journal.found("arm", ANSWER) if e["arm"] != RULE}
    heads = [Head(path, rate) for rate in rates for path in range(decoder.dropout.num_paths)]
    numbered = list(enumerate(items))
    # a prompt's methods stand side by side, so that it is prefilled once for all of them
    jobs = [
        job
        for stream, item in numbered
        for job in (Job(TARGET, item, stream), *(Job(head.name, item, stream, head) for head in heads))
    ]
    alone = draft_engine(decoder, settings) if "accuracy" in parts else None
    draft_jobs = [] if alone is None else [Job(DRAFT, item, stream) for stream, item in numbered]
    with ProgressMeter("answers", len(jobs) + len(draft_jobs), len(done)) as meter:
        for engine, those in ((target_engine(decoder, settings), jobs), (alone, draft_jobs)):
            left = [job for job in those if (job.arm, job.item.id) not in done]
            if engine is not None and left:
                decode_jobs(decoder, engine, left, settings, journal, meter)


def accuracy_rows(
    items: Sequence[Item], arms: Sequence[str], texts: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One row per method: graded answers with Wilson's interval, and the paired difference to the target.

    texts: the journal's entries by method and item."""
    pairs = [(arm, item) for arm in arms for item in items]
    scores = score_all([item for _, item in pairs], [[texts[arm, item.id]["text"]] for arm, item in pairs])
    right: dict[str, list[bool]] = {}
    for (arm, _), score in zip(pairs, scores, strict=True):
        right.setdefault(arm, []).append(bool(score.correct))
    rows = []
    for arm in arms:
        low, high = wilson(sum(right[arm]), len(items))
        paired = paired_difference(right[TARGET], right[arm])
        same = sum(texts[arm, item.id]["tokens"] == texts[TARGET, item.id]["tokens"] for item in items)
        rows.append(
            {
                "arm": arm,
                "n": len(items),
                "correct": sum(right[arm]),
                "accuracy": sum(right[arm]) / len(items),
                "accuracy_low": low,
                "accuracy_high": high,
                "difference": paired.difference,
                "difference_low": paired.low,
                "difference_high": paired.high,
                "p_value": paired.p_value,
                "same_text_as_target": same / len(items),
                "length_mean": statistics.fmean(len(texts[arm, item.id]["tokens"]) for item in items),
            }
        )
    return rows


# -- Table 2 --------------------------------------------------------------------------------------------------------


def _vote(decoder: Decoder, items: Sequence[Item], settings: DecodingSettings, journal: Journal) -> None:
    done = {e["votes"] for e in journal.entries if "votes" in e}
    texts = {e["item"]: e["tokens"] for e in journal.entries if e.get("arm") == TARGET}
    model = HFModel(decoder.target.model, probe=False)
    head = MCDropoutHead(model.head, replace(decoder.dropout, heads="full"))
    with ProgressMeter("votes", len(items), len(done)) as meter:
        for stream, item in enumerate(items):
            if item.id not in done:
                prompt = encode(decoder, item)
                sizes = votes_at(model, head, prompt, texts[item.id], settings.seed, stream)
                journal.add({"votes": item.id, "sizes": sizes})
                meter.advance()


@torch.inference_mode()
def votes_at(
    model: HFModel, head: MCDropoutHead, prompt: Sequence[int], tokens: Sequence[int], seed: int, stream: int
) -> list[dict[str, float]]:
    """The heads' vote at every generated position of a text, in one forward. model must hold no rows.

    Returns by size of the majority, from 1 to K: positions and the sums, over them, of the majority token's probability
    under the centroid and under the undropped target, and of whether it is the target's own token.
    """
    ids = [*prompt, *tokens]
    hidden = model.add_rows([ids[:-1]]).hidden[0, len(prompt) - 1 :]  # [T, d], one for each generated token
    model.filter([])
    position = torch.arange(len(prompt), len(ids), device=hidden.device)  # of the token that each state predicts
    keys = torch.stack([torch.full_like(position, seed), torch.full_like(position, stream), position], dim=-1)
    K = head.config.num_paths
    sums = torch.zeros(K, 4, dtype=torch.float64)
    for start in range(0, len(hidden), _BLOCK):
        block = slice(start, start + _BLOCK)
        heads = head(hidden[block], keys[block], pick=lambda logits, _: logits.argmax(-1), keep_centroid=True)
        assert heads.centroid_logits is not None
        plain = model.head(hidden[block]).float()
        majority = heads.majority[:, None]
        figures = torch.stack(
            [
                torch.ones(len(majority), device=plain.device),
                heads.centroid_logits.softmax(-1).gather(-1, majority)[:, 0],
                plain.softmax(-1).gather(-1, majority)[:, 0],
                (plain.argmax(-1) == heads.majority).float(),
            ],
            dim=1,
        )
        sums.index_add_(0, heads.votes.cpu() - 1, figures.cpu().double())
    names = ("positions", "centroid_prob", "target_prob", "is_target_token")
    return [dict(zip(names, row, strict=True)) for row in sums.tolist()]


def vote_rows(entries: Sequence[Mapping[str, Any]], num_paths: int) -> list[dict[str, Any]]:
    """One row per size of the majority, pooled over texts; None where no position has that size."""
    total = sum(size["positions"] for entry in entries for size in entry["sizes"])
    rows = []
    for i in range(num_paths):
        pooled = {key: sum(entry["sizes"][i][key] for entry in entries) for key in entries[0]["sizes"][i]}
        n = pooled["positions"]
        rows.append(
            {
                "size": i + 1,
                "positions": int(n),
                "share": n / total if total else None,
                "centroid_prob_mean": pooled["centroid_prob"] / n if n else None,
                "target_prob_mean": pooled["target_prob"] / n if n else None,
                "is_target_token": pooled["is_target_token"] / n if n else None,
            }
        )
    return rows


# -- Table 3 --------------------------------------------------------------------------------------------------------


def _diverge(decoder: Decoder, items: Sequence[Item], settings: DecodingSettings, journal: Journal) -> None:
    """Decode by the paper's rule and journal, by item, what was seen at each drafted token that was reached."""
    done = {e["divergence"] for e in journal.entries if "divergence" in e}
    jobs = [Job(RULE, item, stream) for stream, item in enumerate(items) if item.id not in done]
    seen: dict[str, list[list[Any]]] = {}

    def observe(round_: Round, flying: dict[int, Job]) -> None:
        for request, kind, js, radius in judged(round_):
            seen.setdefault(flying[request].item.id, []).append([kind, round(js, 7), round(radius, 7)])

    def extra(job: Job) -> dict[str, Any]:
        return {"divergence": job.item.id, "judged": seen.pop(job.item.id, [])}

    with ProgressMeter("divergences", len(items), len(done)) as meter:
        if jobs:
            engine = target_engine(decoder, settings, make_rule(RULE))
            decode_jobs(decoder, engine, jobs, settings, journal, meter, observe=observe, extra=extra)


def judged(round_: Round) -> list[tuple[int, str, float, float]]:
    """Drafted tokens that the round reached, as (request, "js" | "majority" | "rejected", JS(draft, centroid), radius).
    What stands behind the first rejection was never reached."""
    v, verdict = round_.verification, round_.verdict
    seen = v.seen
    if seen is None:
        return []
    on_path = torch.zeros_like(seen.asked).scatter_(1, verdict.path, True)
    is_reached = seen.asked & on_path.gather(1, v.parent)
    b, n = is_reached.nonzero(as_tuple=True)
    columns = (b, verdict.reason[b, n], seen.js_draft[b, n], seen.radius[b, n])
    return [
        (round_.requests[row], _KINDS[reason], js, radius)
        for row, reason, js, radius in zip(*(column.tolist() for column in columns), strict=True)
    ]


def divergence_rows(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per reason: mean and median JS(draft, centroid) and radius in nats; None where no token has it."""
    rows = []
    every = [token for entry in entries for token in entry["judged"]]
    for kind in _KINDS.values():
        mine = [(js, radius) for name, js, radius in every if name == kind]
        row: dict[str, Any] = {"kept_by": kind, "tokens": len(mine), "share": len(mine) / len(every) if every else None}
        for name, column in (("js_draft", [js for js, _ in mine]), ("radius", [radius for _, radius in mine])):
            row[f"{name}_mean"] = statistics.fmean(column) if column else None
            row[f"{name}_median"] = statistics.median(column) if column else None
        rows.append(row)
    return rows


# -- for people -----------------------------------------------------------------------------------------------------


def print_heads(result: Mapping[str, Any]) -> None:
    """All parts as tables."""
    shown = console()
    if "accuracy" in result:
        table = Table("", "right", "accuracy", "95%", "less target", "95%", "same text", title="Each head alone")
        for row in result["accuracy"]:
            table.add_row(
                row["arm"],
                f"{row['correct']} of {row['n']}",
                f"{row['accuracy']:.1%}",
                f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}",
                f"{100 * row['difference']:+.1f} points",
                f"{100 * row['difference_low']:+.1f} to {100 * row['difference_high']:+.1f}",
                f"{row['same_text_as_target']:.0%}",
            )
        shown.print(table)
    if "votes" in result:
        table = Table("majority of", "positions", "share", "centroid prob", "target prob", "is target's token")
        table.title = f"Votes of {result['settings']['k']} heads, p_drop={result['settings']['p_drop']}"
        for row in result["votes"]:
            probs = [_figure(row[key], ".3f") for key in ("centroid_prob_mean", "target_prob_mean")]
            table.add_row(
                str(row["size"]),
                str(row["positions"]),
                _figure(row["share"], ".2%"),
                *probs,
                _figure(row["is_target_token"], ".1%"),
            )
        shown.print(table)
    if "divergence" in result:
        table = Table("kept by", "tokens", "share", "JS(draft, centroid)", "radius", title="Means in nats, Eq. 6")
        for row in result["divergence"]:
            table.add_row(
                row["kept_by"],
                str(row["tokens"]),
                _figure(row["share"], ".1%"),
                _figure(row["js_draft_mean"], ".4f"),
                _figure(row["radius_mean"], ".4f"),
            )
        shown.print(table)


def _figure(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
