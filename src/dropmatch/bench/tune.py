"""The fastest setting of a pair that stays within a quality budget, on the user's own prompts.

    1. costs      what a draft, a target forward and each way to judge cost at batch 1, by short timed decoding
    2. screening  rule, K, p_drop and guard by successive halving at the longest draft length, in batches: each rung
                  doubles the prompts and keeps half of the candidates. tau at shorter drafts is read off the
                  acceptance by place.
    3. finals     the survivors, each at its best draft length, on prompts that screening has not seen
    4. timing     the choice, lossless and plain decoding in turn at batch 1

Speed is predicted as tau over the cost of a round. Quality is judged by the bounds of `bench.budget` on the prompts of
the finals alone, since the prompts that chose a candidate flatter it.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.analyses.show import console
from dropmatch.bench.answers import encode_turn, measure_quality
from dropmatch.bench.arms import PLAIN, ArmSpec, parse_arms
from dropmatch.bench.budget import (
    Budget,
    Check,
    Records,
    check_budget,
    faster_share,
    mean_length,
    overall,
    pooled_tau,
    tau_by_length,
)
from dropmatch.bench.compare import score_records, settle
from dropmatch.bench.fields import NUMBER
from dropmatch.bench.figures import spread_of
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.settings import NEWER, CompareSettings, weights_of
from dropmatch.bench.side_by_side import rotated
from dropmatch.bench.takeover import journal_records, prompt_digest
from dropmatch.bench.tasks import Item, score
from dropmatch.bench.verdict import cost, verdict
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import RuleOptions
from dropmatch.core.stats import TimeSplit
from dropmatch.errors import ConfigError, UnknownNameError
from dropmatch.provenance import collect

FORMS = {
    "sampled": ("dropmatch", ""),
    "full": ("dropmatch", "@heads=full"),
    "expected": ("dropmatch-expected", ""),
}
_FEWEST_ITEMS = 6
_FIRST_RUNG = 2  # prompts at least
_TIMED = {
    **dict.fromkeys(("arm", "item"), str),
    **dict.fromkeys(("seconds", "decode_s", "judge_s"), NUMBER),
    **dict.fromkeys(("rounds", "tokens"), int),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """What is searched, and how thoroughly. forms: of FORMS; p_drops: numbers or auto, as text; guards: least target
    probability of a lossy token, 0 for none. finalists: candidates that go to the finals. cost_items: prompts that are
    timed, cost_tokens tokens each. strict: recommend lossy settings only where the budget's bounds hold."""

    forms: Sequence[str] = ("sampled", "expected")
    lengths: Sequence[int] = (3, 5, 8, 12)
    ks: Sequence[int] = (5,)
    p_drops: Sequence[str] = ("0.1", "0.2", "0.3")
    guards: Sequence[float] = (0.0, 0.05)
    finalists: int = 3
    cost_items: int = 2
    cost_tokens: int = 48
    max_new_tokens: int | None = None
    batch: int = 16
    seed: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        for form in self.forms:
            if form not in FORMS:
                raise UnknownNameError("form of the rule", form, FORMS)
        for name in ("forms", "lengths", "ks", "p_drops", "guards"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty. Give at least one value.")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rule with its settings, at any draft length. text: as `dropmatch compare` reads it."""

    text: str
    form: str
    k: int
    p_drop: str
    guard: float


def candidates(settings: TuneSettings) -> list[Candidate]:
    """Every combination, in a fixed order."""
    found = []
    for form, k, p_drop, guard in itertools.product(settings.forms, settings.ks, settings.p_drops, settings.guards):
        rule, heads = FORMS[form]
        text = f"{rule}@p={p_drop}@k={k}{heads}" + (f"@guard={guard:g}" if guard else "")
        found.append(Candidate(text, form, k, p_drop, guard))
    return list(dict.fromkeys(found))


def default_budget(items: Sequence[Item]) -> Budget:
    """Two points of accuracy where any prompt has ground truth, else one lossy token in twenty."""
    return Budget(accuracy_drop=0.02) if has_ground_truth(items) else Budget(lossy_share=0.05)


def has_ground_truth(items: Sequence[Item]) -> bool:
    """Whether any of the prompts can be graded. Asks one after the other, since scoring may run programs."""
    return any(score(item, [""] * len(item.turns)).correct is not None for item in items)


def run_tune(
    decoder: Decoder,
    items: Sequence[Item],
    budget: Budget,
    settings: TuneSettings,
    *,
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Search, time and write the results file. Returns what was written.

    described: further settings for the file, such as the models' names, which the recommended command line needs. An
    interrupt leaves a journal, from which the same call goes on. Raises ConfigError, DataError.
    """
    if decoder.drafter is None:
        raise ConfigError("There is no drafter to tune for. Give --draft a draft model, or ngram.")
    if len(items) < _FEWEST_ITEMS:
        raise ConfigError(f"{len(items)} prompts are too few to tune with. Give at least {_FEWEST_ITEMS}, better 50.")
    if budget.accuracy_drop is not None and not has_ground_truth(items):
        raise ConfigError("None of the prompts has ground truth. Give a budget of lossy share or log-prob loss.")
    if budget == Budget():
        raise ConfigError("The budget is empty. State at least one limit.")
    provenance = collect(device=str(decoder.target.device))
    written = {
        **described,
        **json_ready(asdict(settings)),
        "budget": asdict(budget),
        "dtype": str(decoder.target.dtype),
        "items": [item.id for item in items],
        "prompts": [prompt_digest(item.turns) for item in items],
        **weights_of(decoder),
    }
    with Journal(output, written, restart=restart, newer=NEWER) as journal:
        search = _Search(decoder, items, budget, settings, journal)
        timed = sum(len(journal.found(name, _TIMED, is_inner=True)) for name in ("cost", "timing"))
        journal.say_taken_over(f"{len(search.records)} answers, {timed} timings")
        costs = search.measure_costs()
        survivors, rungs = search.screen(costs)
        rows = search.finals(survivors, costs)
        choice = choose(rows, strict=settings.strict)
        timing = search.time_choice(choice)
        result = {
            "kind": "tune",
            "settings": {key: value for key, value in written.items() if key != "prompts"},
            "costs": costs.to_json(),
            "screening": rungs,
            "finals": rows,
            "recommendation": {
                **choice,
                "command": command_line(choice, described),
                "timing": timing,
            },
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


def json_ready(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as a journal reads them back."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


# -- costs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one round at batch 1. lossless: by draft length; plain: of one token; judge: by (form, K), what
    judging takes at the shortest and the longest draft, lossless judging included."""

    plain: float
    lossless: dict[int, float]
    lossless_judge: dict[int, float]
    judge: dict[tuple[str, int], dict[int, float]]

    def of(self, form: str, k: int, length: int) -> float:
        """A round of a candidate: lossless drafting and verifying, with its own judging, in proportion between the
        two lengths that were measured."""
        ends = self.judge[form, k]
        low, high = min(ends), max(ends)
        share = (length - low) / (high - low) if high > low else 0.0
        judge = ends[low] + share * (ends[high] - ends[low])
        return self.lossless[length] - self.lossless_judge[length] + judge

    def to_json(self) -> dict[str, Any]:
        return {
            "plain_ms": 1e3 * self.plain,
            "lossless_round_ms": {str(length): 1e3 * value for length, value in self.lossless.items()},
            "judge_ms": {
                f"{form} k={k}": {str(length): 1e3 * value for length, value in ends.items()}
                for (form, k), ends in self.judge.items()
            },
        }


class _Search:
    """One run: what it works on, and the answers it has so far."""

    def __init__(
        self, decoder: Decoder, items: Sequence[Item], budget: Budget, settings: TuneSettings, journal: Journal
    ) -> None:
        self.decoder, self.budget, self.settings, self.journal = decoder, budget, settings, journal
        cut = max(_FIRST_RUNG, len(items) // 3)
        self.screening, self.final_items = list(items[:cut]), list(items[cut:])
        self.lengths = sorted(set(settings.lengths))
        self.candidates = candidates(settings)
        self.compare = CompareSettings(
            max_new_tokens=settings.max_new_tokens, batch=settings.batch, seed=settings.seed, strips=0
        )
        self._dropouts: dict[Candidate, DropoutConfig] = {}  # with p_drop="auto" settled
        self.records = journal_records(journal, items, self.compare)

    # -- 1 ----------------------------------------------------------------------------------------------------------

    def measure_costs(self) -> Costs:
        _say("1 of 4, costs at batch 1")
        ends = sorted({self.lengths[0], self.lengths[-1]})
        kinds = {(c.form, c.k): c for c in reversed(self.candidates)}
        arms = [self._plain(), *(self._lossless(length) for length in self.lengths)]
        arms += [self._arm(kinds[kind], length) for kind in kinds for length in ends]
        timed = self.screening[: self.settings.cost_items]
        splits = self._time("cost", arms, timed)
        rounds = {name: self._round_seconds(split) for name, split in splits.items()}
        lossless = {length: rounds[self._lossless(length).name] for length in self.lengths}
        judge = {kind: {length: rounds[self._arm(kinds[kind], length).name][1] for length in ends} for kind in kinds}
        return Costs(
            plain=rounds[PLAIN][0],
            lossless={length: whole for length, (whole, _) in lossless.items()},
            lossless_judge={length: judged for length, (_, judged) in lossless.items()},
            judge=judge,
        )

    def _time(self, name: str, arms: Sequence[ArmSpec], items: Sequence[Item]) -> dict[str, list[dict[str, Any]]]:
        """Decode the same number of tokens from each prompt by all methods in turn. Returns entries by method."""
        entries = self.journal.found(name, _TIMED, is_inner=True)
        done = {(e["arm"], e["item"]) for e in entries}
        with ProgressMeter(name, len(arms) * len(items), len(done)) as meter:
            if len(done) < meter.total:
                for arm in arms:
                    self._time_one(arm, items[0], 8)  # warms up
            for i, item in enumerate(items):
                for arm in rotated(arms, i):
                    if (arm.name, item.id) in done:
                        continue
                    entry = {"arm": arm.name, "item": item.id, **self._time_one(arm, item, self.settings.cost_tokens)}
                    self.journal.add({name: entry})
                    entries.append(entry)
                    meter.advance()
        return {arm.name: [e for e in entries if e["arm"] == arm.name] for arm in arms}

    def _time_one(self, arm: ArmSpec, item: Item, num_tokens: int) -> dict[str, Any]:
        config = EngineConfig(
            draft_length=arm.draft_length, seed=self.settings.seed, max_length=self.decoder.config.max_length
        )
        engine = self.decoder.engine(
            rule=arm.made, config=config, dropout=arm.dropout, drafter=None if arm.is_plain else "own"
        )
        params = SamplingParams(max_new_tokens=num_tokens, eos_ids=(), seed=self.settings.seed)
        started = time.perf_counter()
        done = self.decoder.run([encode_turn(self.decoder, item)], params, engine=engine)
        seconds = time.perf_counter() - started
        split: TimeSplit = done.stats.time
        return {
            "seconds": seconds,
            "decode_s": split.decode,
            "judge_s": split.judge,
            "rounds": done.stats.requests.rounds,
            "tokens": done.stats.requests.emitted,
        }

    @staticmethod
    def _round_seconds(entries: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Seconds of a whole round and of its judging, median over prompts."""
        return (
            statistics.median(e["decode_s"] / e["rounds"] for e in entries),
            statistics.median(e["judge_s"] / e["rounds"] for e in entries),
        )

    def _arm(self, candidate: Candidate, length: int) -> ArmSpec:
        (arm,) = parse_arms([candidate.text], [length], self.decoder.dropout, RuleOptions())
        if candidate not in self._dropouts:
            self._dropouts[candidate] = settle(self.decoder, arm)
        return replace(arm, dropout=self._dropouts[candidate])

    def _plain(self) -> ArmSpec:
        (arm,) = parse_arms([PLAIN], [1], self.decoder.dropout, RuleOptions())
        return arm

    def _lossless(self, length: int) -> ArmSpec:
        (arm,) = parse_arms(["lossless"], [length], self.decoder.dropout, RuleOptions())
        return arm

    # -- 2 ----------------------------------------------------------------------------------------------------------

    def screen(self, costs: Costs) -> tuple[list[tuple[Candidate, int]], list[dict[str, Any]]]:
        """Successive halving. Returns the survivors with their best draft length, and the evidence rung by rung."""
        longest, left = self.lengths[-1], list(self.candidates)
        num_rungs = max(1, math.ceil(math.log2(max(1.0, len(left) / self.settings.finalists))))
        rungs: list[dict[str, Any]] = []
        lengths: dict[Candidate, int] = {}
        for rung in range(num_rungs):
            count = max(_FIRST_RUNG, math.ceil(len(self.screening) / 2 ** (num_rungs - 1 - rung)))
            items = self.screening[:count]
            _say(f"2 of 4, screening {len(left)} candidates on {len(items)} prompts (rung {rung + 1} of {num_rungs})")
            arms = {c: self._arm(c, longest) for c in left}
            scored = self._answers(items, [self._lossless(longest), *arms.values()])
            base = scored[self._lossless(longest).name]
            rows = []
            for candidate in left:
                records = scored[arms[candidate].name]
                taus = tau_by_length(records, self.lengths)
                speeds = {n: taus[n] / costs.of(candidate.form, candidate.k, n) for n in self.lengths}
                lengths[candidate] = max(speeds, key=lambda n: speeds[n])
                rows.append(
                    {
                        "rule": candidate.text,
                        "draft_length": lengths[candidate],
                        "tau": taus[lengths[candidate]],
                        "predicted_tokens_per_second": speeds[lengths[candidate]],
                        "predicted_over_plain": speeds[lengths[candidate]] * costs.plain,
                        "checks": [_check_json(check) for check in check_budget(self.budget, records, base)],
                    }
                )
            keep = max(self.settings.finalists, math.ceil(len(left) / 2))
            kept = survivors(rows, keep if rung < num_rungs - 1 else self.settings.finalists)
            rungs.append({"items": len(items), "rows": rows, "kept": [rows[i]["rule"] for i in kept]})
            left = [left[i] for i in kept]
        return [(candidate, lengths[candidate]) for candidate in left], rungs

    def _answers(self, items: Sequence[Item], arms: Sequence[ArmSpec]) -> dict[str, Records]:
        """Scored answers of all methods to all items, by method and item."""
        measure_quality(self.decoder, items, arms, self.compare, self.journal, self.records)
        return {name: arm["items"] for name, arm in score_records(items, arms, self.records).items()}

    # -- 3 ----------------------------------------------------------------------------------------------------------

    def finals(self, finalists: Sequence[tuple[Candidate, int]], costs: Costs) -> list[dict[str, Any]]:
        """One row per method, lossless and plain decoding among them."""
        _say(f"3 of 4, {len(finalists)} finalists on {len(self.final_items)} fresh prompts")
        longest = self._lossless(self.lengths[-1])
        screened = self._answers(self.screening, [longest])[longest.name]
        taus = tau_by_length(screened, self.lengths)
        base_length = max(self.lengths, key=lambda n: taus[n] / costs.lossless[n])
        base = self._lossless(base_length)
        arms = {candidate: self._arm(candidate, length) for candidate, length in finalists}
        scored = self._answers(self.final_items, [base, *arms.values()])
        lossless = scored[base.name]
        base_seconds = costs.lossless[base_length]
        rows = [self._row(base, None, lossless, lossless, base_seconds, base_seconds, costs)]
        for candidate, length in finalists:
            seconds = costs.of(candidate.form, candidate.k, length)
            records = scored[arms[candidate].name]
            rows.append(self._row(arms[candidate], candidate, records, lossless, seconds, base_seconds, costs))
        plain = {
            "arm": PLAIN,
            "rule": PLAIN,
            "draft_length": 0,
            "tau": 1.0,
            "predicted_tokens_per_second": 1.0 / costs.plain,
            "predicted_over_plain": 1.0,
            "predicted_over_lossless": base_seconds / pooled_tau(lossless) / costs.plain,
            "faster_than_lossless": None,
            "length_mean": mean_length(lossless),
            "checks": [],
            "status": "within",
        }
        return [*rows, plain]

    def _row(
        self,
        arm: ArmSpec,
        candidate: Candidate | None,
        records: Records,
        lossless: Records,
        seconds: float,
        base_seconds: float,
        costs: Costs,
    ) -> dict[str, Any]:
        tau = pooled_tau(records)
        checks = [] if candidate is None else check_budget(self.budget, records, lossless)
        row: dict[str, Any] = {
            "arm": arm.name,
            "rule": arm.rule,
            "draft_length": arm.draft_length,
            "tau": tau,
            "predicted_tokens_per_second": tau / seconds,
            "predicted_over_plain": tau / seconds * costs.plain,
            "predicted_over_lossless": tau / seconds / (pooled_tau(lossless) / base_seconds),
            "faster_than_lossless": None,
            "length_mean": mean_length(records),
            "checks": [_check_json(check) for check in checks],
            "status": overall(checks),
        }
        if candidate is not None:
            row["faster_than_lossless"] = faster_share(records, seconds, lossless, base_seconds)
            row |= {
                "form": candidate.form,
                "k": candidate.k,
                "p_drop": arm.dropout.p_drop,
                "guard": candidate.guard,
            }
        return row

    # -- 4 ----------------------------------------------------------------------------------------------------------

    def time_choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """The choice beside lossless and plain decoding, prompt by prompt in turn, in whole calls at batch 1."""
        _say("4 of 4, timing the choice")
        by_name = {arm.name: arm for arm in (self._plain(), self._lossless(choice["lossless_length"]))}
        for candidate in self.candidates:
            if candidate.text == choice["rule"]:
                arm = self._arm(candidate, choice["draft_length"])
                by_name[arm.name] = arm
        items = self.final_items[: self.settings.cost_items]
        entries = self._time("timing", list(by_name.values()), items)
        rates = {name: {e["item"]: e["tokens"] / e["seconds"] for e in mine} for name, mine in entries.items()}

        def over(name: str) -> dict[str, float]:
            ratios = [rates[choice["arm"]][item.id] / rates[name][item.id] for item in items]
            return spread_of(ratios)

        return {
            "items": len(items),
            "tokens": self.settings.cost_tokens,
            "over_plain": over(PLAIN),
            "over_lossless": over(self._lossless(choice["lossless_length"]).name),
        }


def survivors(rows: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Indices of the rows that go on: those whose measured cost is within the budget first, the fastest first among
    them. The one that costs least of the first measure always goes on, since small samples flatter the lossy."""

    def holds(row: Mapping[str, Any]) -> bool:
        return all(check["value"] <= check["limit"] for check in row["checks"])

    order = sorted(range(len(rows)), key=lambda i: (not holds(rows[i]), -rows[i]["predicted_tokens_per_second"]))
    mildest = min(order, key=lambda i: [check["value"] for check in rows[i]["checks"]])
    kept = order[:count]
    if mildest not in kept:
        kept[-1] = mildest
    return kept


def choose(rows: Sequence[Mapping[str, Any]], *, strict: bool) -> dict[str, Any]:
    """The fastest row within the budget, by its bounds; unless strict, a faster one that only its bounds break goes
    before it, and is called unproven. A lossy row must be faster than the exact ones.

    rows: of the finals. Returns the row with "alternative", the fastest exact one, and "lossless_length"."""
    exact = [row for row in rows if row["rule"] in ("lossless", PLAIN)]
    allowed = ("within",) if strict else ("within", "unproven")
    lossy = [row for row in rows if row not in exact and row["status"] in allowed]
    best_exact = max(exact, key=lambda row: row["predicted_tokens_per_second"])
    best = max([best_exact, *lossy], key=lambda row: row["predicted_tokens_per_second"])
    proven = [row for row in lossy if row["status"] == "within"]
    safest = max([best_exact, *proven], key=lambda row: row["predicted_tokens_per_second"])
    return {
        **best,
        "is_proven": best["status"] == "within",
        "proven_alternative": None if best["status"] == "within" else dict(safest),
        "lossless_length": next(row["draft_length"] for row in rows if row["rule"] == "lossless"),
    }


def command_line(choice: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """`dropmatch generate` with the chosen settings, ready to be pasted. described: target, draft, draft_weights,
    min_confidence, dtype and device as they were given."""
    words = ["dropmatch", "generate", "YOUR PROMPT", "--target", described["target"]]
    defaults = {"draft_weights": "own", "min_confidence": 0.0, "dtype": "auto", "device": "auto"}
    if choice["rule"] == PLAIN:
        words += ["--draft", "none"]
        del defaults["draft_weights"], defaults["min_confidence"]
    else:
        if described["draft"] is not None:
            words += ["--draft", described["draft"]]
        words += ["-L", str(choice["draft_length"]), "--rule", str(choice["rule"]).split("@")[0]]
    if choice["rule"] not in (PLAIN, "lossless"):
        words += ["--k", str(choice["k"]), "--p-drop", f"{choice['p_drop']:g}"]
        if choice["guard"]:
            words += ["--guard-prob", f"{choice['guard']:g}"]
        if choice["form"] == "full":
            words += ["--heads", "full"]
    for name, default in defaults.items():
        if described.get(name, default) != default:
            words += [f"--{name.replace('_', '-')}", str(described[name])]
    return shlex.join(words)


def _check_json(check: Check) -> dict[str, Any]:
    return {**asdict(check), "status": check.status}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_tune(result: Mapping[str, Any]) -> None:
    """The evidence, the recommendation with its doubts, and the command line."""
    table = Table("", "tau", "predicted over plain", "over lossless", "cost to answers", "at worst (95%)", "budget")
    for row in sorted(result["finals"], key=lambda row: -row["predicted_tokens_per_second"]):
        measured = [cost(check, check["value"]) for check in row["checks"]]
        worst = [cost(check, check["worst"]) for check in row["checks"]]
        table.add_row(
            row["arm"],
            f"{row['tau']:.2f}",
            f"{row['predicted_over_plain']:.2f}x",
            f"{row['predicted_over_lossless']:.2f}x",
            "\n".join(measured) or "none",
            "\n".join(worst) or "none",
            row["status"],
        )
    shown = console()
    shown.print(table)
    for line in verdict(result):
        shown.print(line, highlight=False, markup=False)
    print(result["recommendation"]["command"])  # never wrapped, so that it can be copied
