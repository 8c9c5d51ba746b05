"""Fits a judge to mined labels: scaled logistic regression, its strength chosen on prompts that it did not see."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dropmatch.core.judge import JudgeHead
from dropmatch.errors import ConfigError
from dropmatch.judge.artefact import even_quantiles

GRID = (*(10.0 ** (-7 + i / 2) for i in range(14)), 1.0, 3.0, 10.0, 50.0, 100.0)
"""Inverse strengths of the L2 penalty."""
NUM_THRESHOLDS = 26
_MOST_STEPS = 1000


def require_scikit_learn() -> None:
    """Raise ConfigError where it is not installed, before anything takes long."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ConfigError("Training a judge needs scikit-learn: pip install 'dropmatch[judge-training]'.") from error


def fit_judge(
    features: NDArray[np.float32],
    is_important: Sequence[bool],
    prompts: Sequence[str],
    *,
    kind: str,
    draft_size: int = 0,
    validation: float = 0.1,
    seed: int = 52,
    grid: Sequence[float] = GRID,
    refit: bool = False,
    folds: int = 1,
    name: str = "judge",
) -> tuple[JudgeHead, dict[str, Any]]:
    """A head and how it was found. features: [M, D]; is_important: [M]; prompts: [M], which prompt a label is of.

    The prompts are split with `seed`, `validation` of them kept apart; of the grid the strength with the largest area
    under the ROC curve there is taken, the weakest model of a tie. Thresholds are 26 even quantiles of what that head
    says of the validation labels. refit: fit the chosen strength to all labels afterwards; the thresholds stay.

    folds: 2 or more deal the prompts into so many parts instead, each kept apart once: area and thresholds come from
    what heads of the other parts say of every label, and the head is fitted to all. Better where prompts are few. The
    area counts pairs of labels of one part: across parts, heads of other base rates would be compared, which puts a
    head that knows nothing below 0.5.
    Raises ConfigError where one side of the split lacks one of the two kinds of labels.
    """
    require_scikit_learn()
    x, y = np.asarray(features, np.float64), np.asarray(is_important, bool)
    parts = [split_prompts(prompts, validation, seed)] if folds < 2 else deal_prompts(prompts, folds, seed)
    splits = [np.array([prompt in part for prompt in prompts]) for part in parts]
    is_held = np.logical_or.reduce(splits)
    remedy = "keep more of them apart with --validation" if folds < 2 else "take other --folds"
    for side, chosen in [*(("training", ~held) for held in splits), ("validation", is_held)]:
        if not _has_both(y[chosen]):
            raise ConfigError(
                f"Of the {int(chosen.sum())} {side} labels {int(y[chosen].sum())} are important; a judge needs both "
                f"kinds on either side. Mine more prompts, or {remedy}."
            )
    if not any(_has_both(y[held]) for held in splits):
        raise ConfigError(f"In none of {folds} folds are there labels of both kinds. Mine more prompts, or {remedy}.")
    tried = []
    best: tuple[float, float, JudgeHead, NDArray[np.float64]] | None = None
    for C in grid:
        p, converged = np.full(len(y), np.nan), True
        for held in splits:
            head, this_converged = _fit(x[~held], y[~held], C, kind, draft_size, name)
            p[held] = head.probability(torch.as_tensor(x[held])).numpy()
            converged &= this_converged
        auc = _area(p, y, splits)
        tried.append({"C": C, "auc": auc, "converged": converged})
        if best is None or auc > best[0]:
            best = (auc, C, head, p[is_held])
    assert best is not None
    auc, chosen_strength, head, seen = best
    refit = refit or folds > 1
    if refit:
        head, _ = _fit(x, y, chosen_strength, kind, draft_size, name)
    thresholds = even_quantiles(seen.tolist(), NUM_THRESHOLDS)
    report = {
        "C": chosen_strength,
        "auc": auc,
        "refit": refit,
        "folds": max(folds, 1),
        "grid": tried,
        "training": _counts(prompts, y, ~is_held if folds < 2 else is_held),
        "validation": {**_counts(prompts, y, is_held), "prompt_ids": sorted(frozenset().union(*parts))},
        "operating_points": _operating_points(thresholds, seen, y[is_held]),
    }
    made = JudgeHead(
        mean=head.mean,
        scale=head.scale,
        weight=head.weight,
        bias=head.bias,
        features=kind,
        draft_size=draft_size,
        thresholds=thresholds,
        name=name,
    )
    return made, report


def _has_both(y: NDArray[np.bool_]) -> bool:
    return bool(0 < y.sum() < len(y))


def _area(p: NDArray[np.float64], y: NDArray[np.bool_], splits: Sequence[NDArray[np.bool_]]) -> float:
    """Area under the ROC curve over all pairs of labels that one head judged. splits: [M] bool, which head judged."""
    from sklearn.metrics import roc_auc_score

    areas = [
        (roc_auc_score(y[held], p[held]), y[held].sum() * (~y[held]).sum()) for held in splits if _has_both(y[held])
    ]
    return float(sum(area * pairs for area, pairs in areas) / sum(pairs for _, pairs in areas))


def deal_prompts(prompts: Sequence[str], folds: int, seed: int) -> list[frozenset[str]]:
    """The distinct prompts, shuffled with the seed and dealt into parts as equal as can be. folds: at least 2."""
    distinct = sorted(set(prompts))
    if len(distinct) < folds:
        raise ConfigError(f"Labels of {len(distinct)} prompts cannot be dealt into {folds} folds. Mine more prompts.")
    order = np.random.RandomState(seed).permutation(len(distinct))
    return [frozenset(distinct[i] for i in order[part::folds]) for part in range(folds)]


def split_prompts(prompts: Sequence[str], validation: float, seed: int) -> frozenset[str]:
    """The prompts to keep apart: a share of the distinct ones, at least one, shuffled with the seed."""
    distinct = sorted(set(prompts))
    if not 0.0 < validation < 1.0:
        raise ConfigError(f"validation={validation!r} is out of range. Give a share between 0 and 1, such as 0.1.")
    if len(distinct) < 2:
        raise ConfigError(f"Labels of {len(distinct)} prompts cannot be split. Mine at least 2.")
    count = min(max(1, round(validation * len(distinct))), len(distinct) - 1)
    order = np.random.RandomState(seed).permutation(len(distinct))
    return frozenset(distinct[i] for i in order[:count])


def _fit(
    x: NDArray[np.float64], y: NDArray[np.bool_], C: float, kind: str, draft_size: int, name: str
) -> tuple[JudgeHead, bool]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model = LogisticRegression(C=C, max_iter=_MOST_STEPS).fit(scaler.transform(x), y)
    converged = not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    head = JudgeHead(
        mean=torch.as_tensor(scaler.mean_),
        scale=torch.as_tensor(scaler.scale_),
        weight=torch.as_tensor(model.coef_[0]),
        bias=float(model.intercept_[0]),
        features=kind,
        draft_size=draft_size,
        name=name,
    )
    return head, converged


def _counts(prompts: Sequence[str], y: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> dict[str, int]:
    return {
        "prompts": len({prompt for prompt, is_chosen in zip(prompts, chosen, strict=True) if is_chosen}),
        "labels": int(chosen.sum()),
        "important": int(y[chosen].sum()),
    }


def _operating_points(
    thresholds: Sequence[float], p: NDArray[np.float64], y: NDArray[np.bool_]
) -> list[dict[str, float | str]]:
    """What each threshold would keep of the validation labels: of all of them, of the important ones."""
    last = len(thresholds) - 1
    return [
        {
            "quantile": f"q{round(i / last, 4):g}",
            "threshold": threshold,
            "kept": float((p < threshold).mean()),
            "important_kept": float((p[y] < threshold).mean()),
        }
        for i, threshold in enumerate(thresholds)
    ]
