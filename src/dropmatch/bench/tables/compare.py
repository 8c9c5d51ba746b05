"""Tables of comparisons: every figure of a file, the trade of tau for accuracy, and several files as in Table 6."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from dropmatch.bench.arms import GENERATE, PLAIN
from dropmatch.bench.bases import well_based
from dropmatch.bench.figures import number, share, spread, spread_of
from dropmatch.bench.intervals import paired_difference
from dropmatch.bench.summary import first_divergence, speed_ratios
from dropmatch.bench.tables import published
from dropmatch.bench.tables.markdown import (
    Named,
    Result,
    block,
    grid,
    machine,
    made_by,
    options,
    pair,
    part,
    percent,
    tau,
    tokens_each,
)
from dropmatch.errors import DataError

_COMPARED = (("tau", "+.2f"), ("lossy_share", "+.2%"), ("logprob_mean", "+.4f"))
_PAPER_RULES = ("dropmatch", "dropmatch-paper")


def every_figure(named: Named) -> str:
    """What the rules keep and what it costs the answers; speed only where it was timed."""
    result, name = named
    rows = well_based(result["summary"])
    has_speed = any(row["over_plain"] or row["over_lossless"] for row in rows)
    has_tasks = len({row["task"] for row in rows}) > 1
    head = ["rule", *(["task"] if has_tasks else []), "tau", "accuracy", "less lossless (95%)", "p", "lossy tokens"]
    head += ["their probability", "log-probability", "length", "repeated 4-grams", "changed answers"]
    head += ["over plain", "over lossless"] if has_speed else []
    lines = [
        [
            f"{row['arm']}{' *' if row['pareto'] else ''}",
            *([row["task"]] if has_tasks else []),
            tau(row),
            _accuracy(row),
            _difference(row),
            "" if row["rule"] == "lossless" else number(row["p_value"], ".2g"),
            percent(row["lossy_share"], 2),
            number(row["lossy_prob_mean"], ".2f"),
            number(row["logprob_mean"], ".3f"),
            number(row["length_ratio"], ".3f"),
            percent(row["repetition"]),
            percent(row["diverged_share"], 0),
            *([spread(row["over_plain"]), spread(row["over_lossless"])] if has_speed else []),
        ]
        for row in rows
    ]
    return block(
        grid(head, lines, left=2 if has_tasks else 1),
        f"{_prompts(result)}. Accuracy in per cent with Wilson's 95% interval; the difference "
        "to lossless is paired by prompt, p is McNemar's exact test; `*`: no rule beats it in both tau and accuracy. "
        f"Log-probability: mean per token of the text under the undropped target. {_run(result)} "
        f"{made_by(result, name)}",
    )


def pareto(named: Named) -> str:
    """tau against accuracy, the highest tau first, those on the front in bold."""
    result, name = named
    rows = well_based(result["summary"])
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    rows = sorted((row for row in rows if row["task"] == tasks[0]), key=lambda row: -row["tau"])
    has_speed = any(row["over_lossless"] for row in rows)
    head = ["rule", "tau", "accuracy", "less lossless (95%)", "p", "lossy tokens", "log-probability, less lossless"]
    lines = [
        [
            f"**{row['arm']}**" if row["pareto"] else row["arm"],
            tau(row),
            _accuracy(row),
            _difference(row),
            "" if row["rule"] == "lossless" else number(row["p_value"], ".2g"),
            percent(row["lossy_share"], 2),
            number(row.get("logprob_difference"), "+.3f"),
            *([spread(row["over_lossless"])] if has_speed else []),
        ]
        for row in rows
    ]
    return block(
        grid([*head, *(["over lossless"] if has_speed else [])], lines),
        f"{_prompts(result)}; bold: no rule beats it in both tau and "
        "accuracy, by the point estimates. Accuracy in per cent with Wilson's 95% interval; the difference to lossless "
        f"is paired by prompt, p is McNemar's exact test. {_run(result)} {made_by(result, name)}",
    )


def timed(named: Named) -> str:
    """Speed at batch 1 alone: whole calls, and decoding without prefill."""
    result, name = named
    speed = part(result, "speed", name)
    rows = {row["arm"]: row for row in _of_first_task(result) if row["over_plain"]}
    lines = []
    for arm, row in rows.items():
        base = rows.get(f"lossless L={row['draft_length']}")
        over = [""] * 2
        if base is not None:
            of, by = speed["arms"][arm], speed["arms"][base["arm"]]
            over = [f"{_per_forward(of) / _per_forward(by):.2f}x", f"{_decoding(of) / _decoding(by):.2f}x"]
        lines.append(
            [
                arm,
                tau(row),
                spread(row["over_plain"]),
                spread(row["over_lossless"]),
                *over,
                percent(row["judge_over_target"]),
            ]
        )
    head = ["rule", "tau", "over plain", "over lossless", "tokens a forward, over lossless"]
    head += ["decoding only, over lossless", "head and rule / target"]
    return block(
        grid(head, lines),
        f"{len(speed['items'])} prompts, {speed['max_new_tokens']} tokens each at batch 1, methods in turn, repeats: "
        f"{speed['repeats']}: whole calls with prefill, median (minimum-maximum) over prompts; tokens a forward and "
        f"decoding only are pooled over them, and set against lossless decoding at the same L; tau is of all "
        f"{len(result['settings']['items'])} prompts. {_run(result)} {machine(result)}. "
        f"{made_by(result, name)}",
    )


def over_generate(named: Named) -> str:
    """Speed over transformers' generate beside accuracy, task by task."""
    result, name = named
    speed = part(result, "speed", name)
    if GENERATE not in speed["arms"]:
        raise DataError(f"{name}: transformers' generate was not timed. Measure with `dropmatch compare --generate`.")
    rows = {(row["task"], row["arm"]): row for row in well_based(result["summary"])}
    lines = []
    for task in dict.fromkeys(prompt["task"] for prompt in result["prompts"].values()):
        items = [item for item in speed["items"] if result["prompts"][item]["task"] == task]
        if not items:
            continue
        for arm in speed["arms"]:
            row = rows.get((task, arm))

            def over(other: str, arm: str = arm, items: Sequence[str] = items) -> str:
                return spread(spread_of(speed_ratios(speed, arm, other, items)))

            figures = ["", "", "", "", ""]
            if row is not None:
                figures = [spread(row["over_lossless"]), tau(row), _accuracy(row), _difference(row)]
                figures.append("" if row["rule"] == "lossless" else percent(row["lossy_share"], 1))
            lines.append([task, f"`{arm}`", over(GENERATE), over(PLAIN), *figures])
    head = ["task", "method", "over `generate`", "over plain", "over lossless, same L", "tau", "accuracy"]
    return block(
        grid([*head, "less lossless (95%)", "lossy tokens"], lines, left=2),
        f"Speed of whole calls with prefill at batch 1: {len(speed['items'])} prompts, at most "
        f"{speed['max_new_tokens']} tokens each, methods in turn, repeats: {speed['repeats']}, median "
        f"(minimum-maximum) over prompts. tau and accuracy are of {_prompts(result)}. Accuracy in per cent with "
        f"Wilson's 95% interval; the difference to lossless is paired by prompt. {_run(result)} {machine(result)}. "
        f"{made_by(result, name)}",
    )


def _decoding(arm: Mapping[str, Any]) -> float:
    """Tokens a second without prefill."""
    return float(sum(arm["tokens"].values()) / arm["time"]["decode_s"])


def _per_forward(arm: Mapping[str, Any]) -> float:
    """Tokens for each forward of the target behind the prefill: tau of the timed calls, their cut ends included."""
    return float(sum(arm["tokens"].values()) / arm["time"]["target_forwards"])


def pairs(named: Named) -> str:
    """Each two lossy rules against each other, on the same prompts."""
    result, name = named
    rows = {row["arm"]: row for row in _of_first_task(result)}
    lossy = [arm for arm, row in rows.items() if row["rule"] not in ("lossless", "plain")]
    if len(lossy) < 2:
        raise DataError(f"{name} has {len(lossy)} lossy rules. Give a file with at least two.")
    lines = []
    for first, second in combinations(lossy, 2):
        a, b = (result["arms"][arm]["items"] for arm in (first, second))
        graded = [item for item in a if item in b and a[item]["score"]["correct"] is not None]
        paired = paired_difference(
            *([bool(answers[item]["score"]["correct"]) for item in graded] for answers in (a, b))
        )
        lines.append(
            [
                f"{second} less {first}",
                *(f"{rows[second][key] - rows[first][key]:{form}}" for key, form in _COMPARED),
                share(asdict(paired), "difference", "low", "high", sign="+"),
                f"{paired.gained}, {paired.lost}",
                f"{paired.p_value:.2g}",
            ]
        )
    head = ["", "tau", "lossy tokens", "log-probability", "accuracy, points (95%)", "gained, lost", "p"]
    return block(
        grid(head, lines),
        f"{_prompts(result)}. Gained, lost: prompts that only the first or only the second named rule solves; p is "
        f"McNemar's exact test. {_run(result)} {made_by(result, name)}",
    )


def seeds(named: Named) -> str:
    """Methods that ran under several seeds (`@seed=`): how far one run lies from another."""
    result, name = named
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in _of_first_task(result):
        runs.setdefault(_without_seed(row["arm"]), []).append(row)
    runs = {arm: each for arm, each in runs.items() if len(each) > 1}
    if not runs:
        raise DataError(f"{name} has no method under more than one seed. Add some: --rules dropmatch,dropmatch@seed=1.")
    lines = [
        [
            arm,
            str(len(each)),
            *(
                _range([row[key] for row in each], form)
                for key, form in (("tau", ".2f"), ("accuracy", ".0%"), ("lossy_share", ".2%"), ("logprob_mean", ".4f"))
            ),
            *_agreement([result["arms"][row["arm"]]["items"] for row in each]),
        ]
        for arm, each in runs.items()
    ]
    head = ["rule", "runs", "tau", "accuracy", "lossy tokens", "log-probability"]
    head += ["prompts with one text in all runs", "first difference, token", "solved in some runs, not in all"]
    return block(
        grid(head, lines),
        f"{_prompts(result)}, decoded again under other seeds: mean (lowest to highest of the runs). First difference: "
        "median over prompts and pairs of runs whose texts differ. "
        f"{_run(result)} {made_by(result, name)}",
    )


def _of_first_task(result: Result) -> list[Mapping[str, Any]]:
    """Rows of the task that stands first."""
    rows = result["summary"]
    return [row for row in rows if row["task"] == rows[0]["task"]]


def _without_seed(arm: str) -> str:
    """`dropmatch@p=0.2@seed=1 L=10` -> `dropmatch@p=0.2 L=10`."""
    return re.sub(r"@seed=\d+", "", arm)


def _range(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.fmean(known):{form}} ({min(known):{form}} to {max(known):{form}})"


def _agreement(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Cells of how alike the answers of several runs are. runs: by prompt, the answer of each run."""
    prompts = [[run[prompt] for run in runs] for prompt in runs[0]]
    same = sum(len({tuple(answer["tokens"]) for answer in answers}) == 1 for answers in prompts)
    places = [
        at for answers in prompts for a, b in combinations(answers, 2) if (at := first_divergence(a, b)) is not None
    ]
    verdicts = [{answer["score"]["correct"] for answer in answers} for answers in prompts]
    mixed = sum(seen == {True, False} for seen in verdicts)
    return [f"{same} of {len(prompts)}", f"{statistics.median(places):.0f}" if places else "", str(mixed)]


def paper6(files: Sequence[Named]) -> str:
    """Table 6: lossless and DropMatch by draft length, tasks side by side, over all files; the paper's pairs below."""
    rows: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    names: dict[tuple[str, int, str], str] = {}  # the file of each cell
    for result, name in files:
        for row in well_based(result["summary"]):
            rule, task, length = row["rule"], row["task"], row["draft_length"]
            if task == "all" or not (rule == "lossless" or rule.split("@")[0] in _PAPER_RULES):
                continue
            cells = rows.setdefault((rule, length), {})
            if task in cells:
                raise DataError(f"{name} has {task} too. Give each task in one file.")
            cells[task] = row
            names[rule, length, task] = name
    _check_side_by_side(rows, names)
    if not rows:
        raise DataError(f"{files[0][1]} compares neither lossless nor dropmatch. Give a file that does.")
    tasks = list(dict.fromkeys(task for cells in rows.values() for task in cells))
    has_speed = any(row["over_lossless"] for cells in rows.values() for row in cells.values())
    head = ["", *(title for task in tasks for title in _task_titles(task, rows, has_speed))]
    lines = [
        [
            f"{rule} L={length}",
            *(text for task in tasks for text in _task_cells(cells, task, has_speed)),
        ]
        for (rule, length), cells in sorted(rows.items(), key=lambda item: (item[0][1], item[0][0] != "lossless"))
    ]
    lengths = {length for _, length in rows}
    for models, methods in published.COMPARISON.items():
        lines += [
            [
                f"paper, {models}: {'DropMatch' if is_lossy else 'lossless'} L={length}",
                *(text for task in tasks for text in _published_cells(methods, is_lossy, length, task, has_speed)),
            ]
            for is_lossy, length in methods
            if length in lengths
        ]
    runs = [_run(result) for result, _ in files]
    if len(set(runs)) > 1:
        runs = [f"`{name}`: {run}" for run, (_, name) in zip(runs, files, strict=True)]
    speed = "; speed over lossless decoding at the same L, median over prompts (minimum-maximum)" if has_speed else ""
    timed = " The paper's speed is put as the quotient at the same L." if has_speed else ""
    return block(
        grid(head, lines),
        "tau with its 95% bootstrap interval over prompts, accuracy in per cent with Wilson's 95% interval and, in "
        f"square brackets, the difference to lossless decoding, paired by prompt, in points{speed}. "
        f"{' '.join(dict.fromkeys(runs))} Paper: Table 6.{timed}",
        *(made_by(result, name) for result, name in files),
    )


def _check_side_by_side(
    rows: Mapping[tuple[str, int], Mapping[str, Mapping[str, Any]]], names: Mapping[tuple[str, int, str], str]
) -> None:
    """Raise DataError where rows of one task are of unlike prompts, or set against the lossless row of another file."""
    first: dict[str, tuple[int, str]] = {}
    for (rule, length, task), name in names.items():
        n = rows[rule, length][task]["n"]
        other_n, other = first.setdefault(task, (n, name))
        if n != other_n:
            raise DataError(
                f"{other} has {task} with {other_n} prompts, and {name} with {n}. Measure both on the same prompts: "
                "`dropmatch compare` extends the shorter one if all of them are given."
            )
        bases = [file for (other_rule, _, of), file in names.items() if (other_rule, of) == ("lossless", task)]
        base = names.get(("lossless", length, task), name if name in bases else next(iter(bases), name))
        if base != name:
            raise DataError(
                f"{name} has {rule} L={length} on {task}, and its lossless row is that of another run, {base}. Add the "
                f"rule to that file: dropmatch compare --rules {rule} --lengths {length} -o {base}, with its other "
                "options as they were."
            )


def _task_titles(task: str, rows: Mapping[Any, Mapping[str, Mapping[str, Any]]], has_speed: bool) -> list[str]:
    n = next(cells[task]["n"] for cells in rows.values() if task in cells)
    return [f"{task} (n={n}): tau", f"{task}: accuracy", *([f"{task}: over lossless"] if has_speed else [])]


def _task_cells(cells: Mapping[str, Mapping[str, Any]], task: str, has_speed: bool) -> list[str]:
    if task not in cells:
        return [""] * (3 if has_speed else 2)
    row = cells[task]
    difference = _difference(row)
    quality = _accuracy(row) + (f" [{difference}]" if difference else "")
    return [tau(row), quality, *([spread(row["over_lossless"])] if has_speed else [])]


def _published_cells(
    methods: Mapping[tuple[bool, int], Mapping[str, tuple[float, float, float]]],
    is_lossy: bool,
    length: int,
    task: str,
    has_speed: bool,
) -> list[str]:
    if task not in methods[is_lossy, length]:
        return [""] * (3 if has_speed else 2)
    speed, paper_tau, quality = methods[is_lossy, length][task]
    base = methods[False, length][task][0]
    return [f"{paper_tau:.2f}", f"{quality:.1f}", *([f"{speed / base:.2f}x"] if has_speed else [])]


def _accuracy(row: Mapping[str, Any]) -> str:
    return share(row, "accuracy", "accuracy_low", "accuracy_high")


def _difference(row: Mapping[str, Any]) -> str:
    """Accuracy less that of lossless decoding, which has none to itself."""
    if row["rule"] == "lossless":
        return ""
    return share(row, "accuracy_difference", "difference_low", "difference_high", sign="+")


def _prompts(result: Result) -> str:
    """How many prompts of which tasks, and how many of them could be graded where not all could."""
    rows, n = result["summary"], len(result["settings"]["items"])
    tasks = ", ".join(dict.fromkeys(row["task"] for row in rows if row["task"] != "all"))
    graded = max((row.get("graded") or 0 for row in rows), default=0)
    return f"{n} prompts of {tasks}" + (f", {graded} of them graded" if 0 < graded < n else "")


def _run(result: Result) -> str:
    settings = result["settings"]
    return (
        f"Pair: {pair(settings)}, {options(settings)} where a rule does not say; temperature "
        f"{settings['temperature']:g}, {tokens_each(settings)}; torch {result['provenance']['torch']}."
    )
