"""Fitting: the head that comes out is scikit-learn's, its strength is chosen on prompts that it did not see."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from dropmatch.errors import ConfigError
from dropmatch.judge.fitting import GRID, NUM_THRESHOLDS, deal_prompts, fit_judge, split_prompts

pytest.importorskip("sklearn")

SIZE = 5
ROUNDING = 1e-9  # float64 sums of a few products


def _labels(num_prompts: int = 40, each: int = 10, *, seed: int = 0) -> tuple[np.ndarray, list[bool], list[str]]:
    """Labels that depend on the first two features, with noise."""
    generator = np.random.default_rng(seed)
    x = (generator.normal(size=(num_prompts * each, SIZE)) * [3, 1, 1, 0.1, 1] + [5, 0, 0, 2, 0]).astype(np.float32)
    score = (x[:, 0] - 5) / 3 + x[:, 1] + generator.normal(size=len(x))
    prompts = [f"p{i // each}" for i in range(len(x))]
    return x, (score > 0.7).tolist(), prompts


def test_the_grid_is_the_published_one() -> None:
    assert len(GRID) == 19
    assert GRID[:14] == pytest.approx([10 ** (-7 + i / 2) for i in range(14)])
    assert GRID[13:] == pytest.approx([10**-0.5, 1, 3, 10, 50, 100])


def test_the_head_is_the_one_that_scikit_learn_fits() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import StandardScaler

    x, y, prompts = _labels()
    head, report = fit_judge(x, y, prompts, kind="DT")
    held = np.array([prompt in split_prompts(prompts, 0.1, 52) for prompt in prompts])
    scaler = StandardScaler().fit(x[~held].astype(float))
    model = LogisticRegression(C=report["C"], max_iter=1000).fit(
        scaler.transform(x[~held].astype(float)), np.array(y)[~held]
    )
    expected = model.predict_proba(scaler.transform(x.astype(float)))[:, 1]
    assert np.allclose(head.probability(torch.as_tensor(x)).numpy(), expected, rtol=0, atol=ROUNDING)
    assert report["auc"] == pytest.approx(roc_auc_score(np.array(y)[held], expected[held]))
    assert report["auc"] == max(entry["auc"] for entry in report["grid"])
    assert report["auc"] > 0.75
    assert head.thresholds == pytest.approx(np.quantile(expected[held], np.linspace(0, 1, NUM_THRESHOLDS)).tolist())


def test_the_weakest_model_of_a_tie_is_taken() -> None:
    x, y, prompts = _labels()
    _, report = fit_judge(x, y, prompts, kind="DT", grid=(0.01, 0.01, 0.5))
    assert [entry["C"] for entry in report["grid"]] == [0.01, 0.01, 0.5]
    best = max(entry["auc"] for entry in report["grid"])
    assert report["C"] == next(entry["C"] for entry in report["grid"] if entry["auc"] == best)


def test_labels_of_one_prompt_stay_on_one_side_and_the_split_repeats() -> None:
    _, y, prompts = _labels()
    held = split_prompts(prompts, 0.1, 52)
    assert len(held) == 4
    assert held == split_prompts(prompts[::-1], 0.1, 52) != split_prompts(prompts, 0.1, 53)
    _, report = fit_judge(*_labels(), kind="DT", validation=0.25)
    assert report["training"]["prompts"] == 30
    assert report["validation"]["prompts"] == 10
    assert report["training"]["labels"] + report["validation"]["labels"] == len(y)
    assert report["training"]["important"] + report["validation"]["important"] == sum(y)


def test_operating_points_say_what_a_threshold_keeps() -> None:
    x, y, prompts = _labels()
    head, report = fit_judge(x, y, prompts, kind="DD-DT", draft_size=2)
    assert (head.features, head.draft_size) == ("DD-DT", 2)
    held = np.array([prompt in report["validation"]["prompt_ids"] for prompt in prompts])
    p = head.probability(torch.as_tensor(x[held])).numpy()
    assert [point["quantile"] for point in report["operating_points"]][:3] == ["q0", "q0.04", "q0.08"]
    for point in report["operating_points"]:
        assert head.threshold(point["quantile"]) == pytest.approx(point["threshold"])
        assert point["kept"] == pytest.approx((p < point["threshold"]).mean())
        assert point["important_kept"] == pytest.approx((p[np.array(y)[held]] < point["threshold"]).mean())
    assert report["operating_points"][0]["kept"] == 0.0


def test_a_refit_uses_all_labels_and_leaves_the_thresholds() -> None:
    plain, report = fit_judge(*_labels(), kind="DT")
    again, refit = fit_judge(*_labels(), kind="DT", refit=True)
    assert again.thresholds == plain.thresholds
    assert refit["C"] == report["C"]
    assert torch.equal(again.mean, torch.as_tensor(_labels()[0].astype(float).mean(0)))
    assert not torch.equal(again.weight, plain.weight)


def test_a_feature_that_never_changes_is_harmless() -> None:
    x, y, prompts = _labels()
    x[:, 3] = 2.0
    head, _ = fit_judge(x, y, prompts, kind="DT")
    assert bool((head.scale > 0).all())


@pytest.mark.parametrize("value", [True, False])
def test_labels_of_one_kind_are_refused(value: bool) -> None:
    x, y, prompts = _labels(6, 4)
    with pytest.raises(ConfigError, match=r"training labels (0|\d+) are important.*both kinds on either side"):
        fit_judge(x, [value] * len(y), prompts, kind="DT")


def test_a_validation_side_without_important_labels_is_refused() -> None:
    x, _, prompts = _labels(10, 4)
    held = split_prompts(prompts, 0.1, 52)
    y = [prompt not in held and i % 2 == 0 for i, prompt in enumerate(prompts)]
    with pytest.raises(ConfigError, match=r"Of the 4 validation labels 0 are important"):
        fit_judge(x, y, prompts, kind="DT")


def test_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="Mine at least 2"):
        split_prompts(["a", "a"], 0.1, 0)
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(ConfigError, match="validation="):
            split_prompts(["a", "b"], share, 0)


def test_a_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'dropmatch\[judge-training\]'"):
        fit_judge(*_labels(), kind="DT")


def test_folds_judge_every_label_by_heads_that_did_not_see_its_prompt() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import StandardScaler

    x, y, prompts = _labels(12, 10)
    head, report = fit_judge(x, y, prompts, kind="DT", folds=3, grid=(0.01, 1.0))
    parts = deal_prompts(prompts, 3, 52)
    assert [len(part) for part in parts] == [4, 4, 4]
    assert frozenset().union(*parts) == set(prompts)
    aucs = []
    for C in (0.01, 1.0):
        p = np.zeros(len(y))
        for part in parts:
            held = np.array([prompt in part for prompt in prompts])
            scaler = StandardScaler().fit(x[~held].astype(float))
            model = LogisticRegression(C=C, max_iter=1000).fit(
                scaler.transform(x[~held].astype(float)), np.array(y)[~held]
            )
            p[held] = model.predict_proba(scaler.transform(x[held].astype(float)))[:, 1]
        of_folds = []
        for part in parts:
            held = np.array([prompt in part for prompt in prompts])
            important = np.array(y)[held]
            of_folds.append((roc_auc_score(important, p[held]), important.sum() * (~important).sum()))
        aucs.append(sum(area * pairs for area, pairs in of_folds) / sum(pairs for _, pairs in of_folds))
        if report["C"] == C:
            assert head.thresholds == pytest.approx(np.quantile(p, np.linspace(0, 1, NUM_THRESHOLDS)).tolist())
    assert [entry["auc"] for entry in report["grid"]] == pytest.approx(aucs)
    assert report["auc"] == pytest.approx(max(aucs))
    assert report["training"] == {"prompts": 12, "labels": 120, "important": sum(y)}
    assert report["validation"]["labels"] == 120
    assert torch.equal(head.mean, torch.as_tensor(x.astype(float).mean(0)))  # the head itself saw them all


def test_a_head_that_knows_nothing_has_half_the_area_by_folds() -> None:
    """Pooled over folds it has less: where many labels are important, the other folds' base rate is low."""
    generator = np.random.default_rng(3)
    prompts = [f"p{i // 30}" for i in range(240)]
    y = [(i // 30) % 2 == 0 if i % 10 else (i // 30) % 2 == 1 for i in range(240)]  # 90% or 10% of a prompt's
    x = generator.normal(size=(240, SIZE)).astype(np.float32)
    _, report = fit_judge(x, y, prompts, kind="DT", folds=8, grid=(1e-7,))
    assert report["auc"] == pytest.approx(0.5, abs=0.12)


def test_folds_without_labels_of_both_kinds_are_refused() -> None:
    x, _, prompts = _labels(4, 10)
    y = [prompt in ("p0", "p1") for prompt in prompts]
    with pytest.raises(ConfigError, match=r"In none of 4 folds.*other --folds"):
        fit_judge(x, y, prompts, kind="DT", folds=4)


def test_more_folds_than_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 prompts cannot be dealt into 4 folds"):
        fit_judge(*_labels(3, 10), kind="DT", folds=4)
