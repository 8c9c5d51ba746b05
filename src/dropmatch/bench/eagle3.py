"""EAGLE-3 with and without DropMatch by tree depth (Table 7), and far from its training text (Table 10).

Each part is a comparison of its own (see compare.py) in a folder beside the results file, which keeps the rows that the
paper's tables have. A stopped run goes on with the part it was in. The prompts must not be those the head learnt from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.analyses.decoding import fingerprint
from dropmatch.bench.analyses.show import console
from dropmatch.bench.arms import parse_arms
from dropmatch.bench.compare import run_compare
from dropmatch.bench.comparison import read_finished
from dropmatch.bench.journal import Journal
from dropmatch.bench.results import write_result
from dropmatch.bench.settings import NEWER, CompareSettings, weights_of
from dropmatch.bench.tasks import Item
from dropmatch.core.acceptance import RuleOptions, make_rule
from dropmatch.core.interfaces import Drafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.errors import ConfigError
from dropmatch.provenance import collect

BASE = "lossless"
_KOREAN = (
    "하늘이 파란 이유를 초등학생에게 설명해 주세요.",
    "서울에서 부산까지 가는 방법 세 가지를 비교해 주세요.",
    "김치를 담그는 순서를 단계별로 알려 주세요.",
    "작은 회사의 새 직원을 환영하는 짧은 편지를 써 주세요.",
    "사과 세 개에 이천 원이면 사과 열두 개는 얼마입니까? 풀이를 써 주세요.",
    "봄비를 주제로 짧은 시를 한 편 써 주세요.",
    "책을 많이 읽으면 좋은 점을 다섯 가지 적어 주세요.",
    "친구에게 약속에 늦어서 미안하다는 메시지를 써 주세요.",
    "물이 끓는 과정을 과학적으로 설명해 주세요.",
    "주말에 가족과 할 수 있는 일을 추천해 주세요.",
    "파이썬에서 리스트와 튜플의 차이를 설명해 주세요.",
    "한글이 만들어진 까닭을 간단히 이야기해 주세요.",
)


@dataclass(frozen=True, slots=True)
class Eagle3Bench:
    """What to compare. lengths: levels of the trees, the paper's L plus one. rule: set against lossless with the head;
    other_rule: with the other drafters, at the first length. draft_model: the same target with one, if there is any."""

    lengths: Sequence[int]
    rule: str = "dropmatch-naive"
    other_rule: str = "dropmatch"
    draft_model: Decoder | None = None

    def check(self) -> None:
        """Raises UnknownNameError for rules that do not exist, ConfigError for lossless itself."""
        for rule in (self.rule, self.other_rule):
            make_rule(rule)
            if rule == BASE:
                raise ConfigError("The rules are set against lossless decoding. Name others, such as dropmatch-naive.")


def parts_folder(output: Path) -> Path:
    """Where the parts of a results file go. Raises ConfigError if its name has no ending, or a file is in the way."""
    folder = output.with_suffix("")
    if folder == output:
        raise ConfigError(f"--output={str(output)!r} has no ending. Name a file such as {output.name or 'bench'}.json.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder, and the parts of {output.name} go there. Name another --output.")
    return folder


def korean_items(max_new_tokens: int = 256) -> list[Item]:
    """Twelve short prompts in Korean, for heads that were trained on English."""
    return [
        Item(f"korean/{number}", "prompts", (text,), {"prompt": text}, (), max_new_tokens)
        for number, text in enumerate(_KOREAN)
    ]


def run_eagle3(
    decoder: Decoder,
    items: Sequence[Item],
    other_items: Sequence[Item],
    bench: Eagle3Bench,
    settings: CompareSettings,
    *,
    described: Mapping[str, Any],
    data: Sequence[str],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Measure all parts and write the results file. Returns what was written.

    decoder: with an EAGLE-3 head. items: of the kind that the head was trained for; other_items: of another kind.
    Raises ConfigError if the decoder drafts with something else.
    """
    bench.check()
    drafter = decoder.drafter
    if not isinstance(drafter, Eagle3Drafter):
        raise ConfigError("This benchmark is about EAGLE-3 heads, and the draft is none. Name a head's folder.")
    written = {
        **described,
        "data": list(data),
        "tree_tokens": drafter.tree_tokens,
        "top_k": drafter.top_k,
        "lengths": list(bench.lengths),
        "rule": bench.rule,
        "other_rule": bench.other_rule,
        "k": decoder.dropout.num_paths,
        "p_drop": decoder.dropout.p_drop,
        "heads": decoder.dropout.heads,
        "dtype": str(decoder.target.dtype),
        "items": [item.id for item in items],
        "other_items": [item.id for item in other_items],
        "prompts": fingerprint([*items, *other_items]),
        "max_new_tokens": settings.max_new_tokens,
        "speed_items": settings.speed_items,
        "repeats": settings.repeats,
        "speed_tokens": settings.speed_tokens,
        "seed": settings.seed,
        **weights_of(decoder),
    }
    provenance = collect(device=str(decoder.target.device))
    folder = parts_folder(output)
    with Journal(output, written, restart=restart, newer=(*NEWER, "prompts")) as journal:
        done = {entry["part"] for entry in journal.found("part", {"part": str})}
        if done:
            journal.say_taken_over(f"the parts {', '.join(sorted(done))}")
        parts: dict[str, dict[str, Any]] = {}
        for name, part in _parts(decoder, drafter, items, other_items, bench, settings).items():
            path = folder / f"{name}.json"
            if name in done and path.exists():
                parts[name] = read_finished(path)
                continue
            parts[name] = part.run({**described, "part": name}, data, path, restart)
            journal.add({"part": name})
        result = {
            "kind": "bench-eagle3",
            "format": 1,
            "settings": written,
            "depths": _depth_rows(parts["trees"], bench),
            "chain": [_row(row) for row in parts["chain"]["summary"] if row["task"] == _pooled(parts["chain"])],
            "domains": _domain_rows(parts),
            "parts": [f"{folder.name}/{name}.json" for name in parts],
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


@dataclass(frozen=True, slots=True)
class _Part:
    """One comparison: a drafter, prompts, rules and draft lengths."""

    decoder: Decoder
    items: Sequence[Item]
    rules: Sequence[str]
    lengths: Sequence[int]
    settings: CompareSettings

    def run(self, described: Mapping[str, Any], data: Sequence[str], output: Path, restart: bool) -> dict[str, Any]:
        arms = parse_arms(self.rules, self.lengths, self.decoder.dropout, RuleOptions())
        return run_compare(
            self.decoder,
            self.items,
            arms,
            self.settings,
            described=described,
            data=data,
            output=output,
            restart=restart,
        )


def _parts(
    decoder: Decoder,
    drafter: Eagle3Drafter,
    items: Sequence[Item],
    other_items: Sequence[Item],
    bench: Eagle3Bench,
    settings: CompareSettings,
) -> dict[str, _Part]:
    first, untimed = [bench.lengths[0]], replace(settings, speed_items=0)
    chain = Eagle3Drafter(drafter.head, drafter.vocab_size, tree_tokens=drafter.tree_tokens, top_k=1)
    rules, other_rules = [BASE, bench.rule], [BASE, bench.other_rule]
    others = {"ngram": _with_drafter(decoder, NgramDrafter(decoder.target.device))}
    if bench.draft_model is not None:
        others["draft-model"] = bench.draft_model
    parts = {
        "trees": _Part(decoder, items, rules, bench.lengths, settings),
        "chain": _Part(_with_drafter(decoder, chain), items, rules, first, untimed),
        "eagle3-other": _Part(decoder, other_items, rules, first, untimed),
    }
    for name, theirs in others.items():
        parts[f"{name}-own"] = _Part(theirs, items, other_rules, first, untimed)
        parts[f"{name}-other"] = _Part(theirs, other_items, other_rules, first, untimed)
    return parts


def _with_drafter(decoder: Decoder, drafter: Drafter) -> Decoder:
    return Decoder(
        decoder.target,
        decoder.tokenizer,
        drafter,
        rule=decoder.rule,
        dropout=decoder.dropout,
        config=decoder.config,
    )


# -- rows -----------------------------------------------------------------------------------------------------------

_KEPT = (
    *("arm", "rule", "draft_length", "n", "tau", "tau_low", "tau_high", "acceptance_by_position"),
    *("lossy_share", "logprob_mean", "logprob_difference", "repetition", "accuracy", "accuracy_low", "accuracy_high"),
    *("accuracy_difference", "difference_low", "difference_high", "tokens_per_second", "over_plain", "over_lossless"),
)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in _KEPT}


def _pooled(result: Mapping[str, Any]) -> str:
    """The task whose row covers all items."""
    tasks = {row["task"] for row in result["summary"]}
    return "all" if len(tasks) > 1 else next(iter(tasks))


def _depth_rows(result: Mapping[str, Any], bench: Eagle3Bench) -> list[dict[str, Any]]:
    """One row per task, method and depth. paper_depth: what the paper and the official code call the depth."""
    return [
        {"task": row["task"], "paper_depth": row["draft_length"] - 1, **_row(row)}
        for row in result["summary"]
        if row["rule"] in (BASE, bench.rule)
    ]


def _domain_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """tau of each drafter on both kinds of prompts, at the first length."""
    own, rows = {"eagle3": "trees"}, []
    drafters = [name.removesuffix("-other") for name in parts if name.endswith("-other")]
    for drafter in drafters:
        for domain, name in (("own", own.get(drafter, f"{drafter}-own")), ("other", f"{drafter}-other")):
            result = parts[name]
            pooled = [row for row in result["summary"] if row["task"] == _pooled(result)]
            shortest = min(row["draft_length"] for row in pooled)
            rows += [
                {"drafter": drafter, "domain": domain, **_row(row)} for row in pooled if row["draft_length"] == shortest
            ]
    return rows


def print_eagle3(result: Mapping[str, Any]) -> None:
    """Both tables, and what they were measured on."""
    shown, settings = console(), result["settings"]
    table = Table("task", "method", "levels (paper's L)", "over plain", "tau", "accuracy", "lossy", title="By depth")
    for row in result["depths"]:
        table.add_row(
            row["task"],
            "EAGLE-3" if row["rule"] == BASE else f"EAGLE-3 + {row['rule']}",
            f"{row['draft_length']} ({row['paper_depth']})",
            "" if row["over_plain"] is None else f"{row['over_plain']['median']:.2f}x",
            f"{row['tau']:.2f}",
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
            f"{row['lossy_share']:.1%}",
        )
    shown.print(table)
    chain = ", ".join(f"{row['rule']} {row['tau']:.2f}" for row in result["chain"])
    shown.print(f"tau of chains of {settings['lengths'][0]}: {chain}.")
    table = Table("drafter", "rule", "prompts", "tau", title="Far from the training text")
    for row in result["domains"]:
        table.add_row(row["drafter"], row["rule"], row["domain"], f"{row['tau']:.2f}")
    shown.print(table)
    shown.print(
        f"{len(settings['items'])} own and {len(settings['other_items'])} other prompts, trees of at most "
        f"{settings['tree_tokens']} nodes, {settings['top_k']} children, K={settings['k']}, "
        f"p_drop={settings['p_drop']}, {settings['dtype'].removeprefix('torch.')}."
    )
