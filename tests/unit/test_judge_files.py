"""Judges in files: what is written comes back, and files that are wrong or hostile are refused by name, unrun."""

from __future__ import annotations

import collections
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dropmatch.core.judge import JudgeHead
from dropmatch.errors import ConfigError, DataError, IntegrityError
from dropmatch.judge import judge_info, load_judge, save_judge
from dropmatch.judge.artefact import even_quantiles
from dropmatch.judge.pickles import read_pickled_judge
from toys import judge_head

SIZE = 6


def _same(a: JudgeHead, b: JudgeHead) -> bool:
    tensors = all(torch.equal(getattr(a, n).double(), getattr(b, n).double()) for n in ("mean", "scale", "weight"))
    rest = all(getattr(a, n) == getattr(b, n) for n in ("bias", "features", "draft_size", "thresholds"))
    return tensors and rest


def _exported(head: JudgeHead) -> dict[str, Any]:
    return {
        "mean": head.mean.double().numpy(),
        "scale": head.scale.double().numpy(),
        "weights": head.weight.double().numpy()[None],
        "bias": np.array([head.bias]),
        "thr": 0.25,
        "thresholds": np.array(head.thresholds),
    }


# --- our own folder ---


@pytest.mark.parametrize(
    "head", [judge_head(SIZE, bias=0.3), judge_head(SIZE, draft_size=2, seed=4)], ids=["DT", "DD-DT"]
)
def test_a_saved_judge_comes_back(tmp_path: Path, head: JudgeHead) -> None:
    save_judge(head, tmp_path / "judge", {"C": 0.001, "auc": 0.8})
    assert _same(load_judge(tmp_path / "judge"), head)
    assert load_judge(tmp_path / "judge").name == "judge"
    for name in ("judge.json", "judge.safetensors"):
        assert _same(load_judge(tmp_path / "judge" / name), head)
    assert judge_info(tmp_path / "judge")["auc"] == 0.8
    assert sorted(path.name for path in (tmp_path / "judge").iterdir()) == ["judge.json", "judge.safetensors"]
    save_judge(judge_head(SIZE, seed=9), tmp_path / "judge", {})
    assert not _same(load_judge(tmp_path / "judge"), head)


def _damage(folder: Path, tensors: dict[str, Any] | None = None, described: dict[str, Any] | None = None) -> None:
    stored = {name: tensor.clone() for name, tensor in load_file(folder / "judge.safetensors").items()}
    for name, tensor in (tensors or {}).items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / "judge.safetensors")
    info = {**json.loads((folder / "judge.json").read_text()), **(described or {})}
    (folder / "judge.json").write_text(json.dumps({k: v for k, v in info.items() if v is not None}))


@pytest.mark.parametrize(
    ("tensors", "described", "message"),
    [
        ({"scale": None}, {}, "'scale' is missing"),
        ({"weight": None, "weights": torch.ones(SIZE)}, {}, "'weight' is missing"),
        ({"mean": torch.zeros(SIZE + 1)}, {}, r"'mean' has shape \[7\] beside 6 weights"),
        ({"weight": torch.ones(2, SIZE)}, {}, r"'weight' has shape|beside 12 weights"),
        ({"mean": torch.full((SIZE,), float("nan"))}, {}, "'mean' holds numbers that are not finite"),
        ({"scale": torch.zeros(SIZE)}, {}, "'scale' holds numbers that are not positive"),
        ({"scale": torch.ones(SIZE, dtype=torch.bool)}, {}, "'scale' holds torch.bool"),
        ({"bias": torch.zeros(2)}, {}, "'bias' holds 2 numbers"),
        ({"bias": torch.tensor(float("inf"))}, {}, "'bias' is inf"),
        ({}, {"features": "TT"}, "'features' is 'TT'"),
        ({}, {"features": "DD-DT"}, "'draft_size' is 0"),
        ({}, {"features": "DD-DT", "draft_size": "2"}, "'draft_size' is '2' and no whole number"),
        ({}, {"thresholds": None}, "'thresholds' is missing"),
        ({}, {"thresholds": [0.9, 0.1]}, "'thresholds' must be rising"),
        ({}, {"thresholds": ["high"]}, "'thresholds' does not hold numbers"),
        ({}, {"kind": "compare"}, "is no judge of format 1"),
        ({}, {"format": 2}, "is no judge of format 1"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], described: dict[str, Any], message: str
) -> None:
    save_judge(judge_head(SIZE), tmp_path, {})
    _damage(tmp_path, tensors, described)
    with pytest.raises(IntegrityError, match=message) as error:
        load_judge(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing does not exist"):
        load_judge(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"judge\.json is missing"):
        load_judge(tmp_path)
    save_judge(judge_head(SIZE), tmp_path, {})
    (tmp_path / "judge.safetensors").unlink()
    with pytest.raises(DataError, match=r"judge\.safetensors is missing"):
        load_judge(tmp_path)


@pytest.mark.parametrize("name", ["judge.safetensors", "judge.json"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"[1, 2]", b"\xff" * 40])
def test_files_of_something_else_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    save_judge(judge_head(SIZE), tmp_path, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(IntegrityError, match=name):
        load_judge(tmp_path)


# --- the exported form ---


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "json"])
@pytest.mark.parametrize("flat", [True, False])
def test_the_exported_form_is_read(tmp_path: Path, suffix: str, flat: bool) -> None:
    head, path = judge_head(SIZE, bias=-0.4), tmp_path / f"export.{suffix}"
    arrays = _exported(head)
    if flat:
        arrays |= {"weights": arrays["weights"][0], "bias": arrays["bias"][0]}
    _write(path, arrays)
    assert _same(load_judge(path), head)


def _write(path: Path, arrays: dict[str, Any]) -> None:
    if path.suffix == ".safetensors":
        save_file({name: torch.as_tensor(np.asarray(a, dtype=np.float64)) for name, a in arrays.items()}, path)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.write_text(json.dumps({name: np.asarray(array).tolist() for name, array in arrays.items()}))


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "json"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": None}, "'weights' is missing. It holds bias, mean"),
        ({"mean": np.zeros(SIZE - 1)}, r"'mean' has shape \[5\] beside 6 weights"),
        ({"scale": np.full(SIZE, np.nan)}, "'scale' holds numbers that are not finite"),
        ({"thresholds": np.array([0.5, np.nan])}, "'thresholds'"),
    ],
)
def test_a_wrong_export_is_refused_by_name(tmp_path: Path, suffix: str, change: dict[str, Any], message: str) -> None:
    path = tmp_path / f"export.{suffix}"
    arrays = {name: array for name, array in {**_exported(judge_head(SIZE)), **change}.items() if array is not None}
    _write(path, arrays)
    with pytest.raises(IntegrityError, match=message):
        load_judge(path)


def test_json_that_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    for value in ("wide", {"a": 1}, [[1, 2], [3]], None):
        path.write_text(json.dumps({"mean": value, "scale": [1], "weights": [1], "bias": 0}))
        with pytest.raises(
            IntegrityError, match=r"'mean' does not hold numbers|'mean' holds numbers that are not finite"
        ):
            load_judge(path)


# --- pickles ---


class _Trap:
    """Unpickling this calls os.mkdir, as a hostile file would call worse."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["judge.pkl", "judge.pt", "judge.joblib", "judge", "judge.npz", "judge.safetensors"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    path, sprung = tmp_path / name, tmp_path / "sprung"
    path.write_bytes(pickle.dumps({**_exported(judge_head(SIZE)), "extra": _Trap(sprung)}))
    with pytest.raises(IntegrityError) as error:
        load_judge(path)
    assert str(path) in str(error.value)
    assert not sprung.exists()
    if path.suffix not in (".npz", ".safetensors"):
        assert f"dropmatch train convert-judge {name} FOLDER" in str(error.value)


@pytest.mark.parametrize("content", ["cut", "member", "array"])
def test_a_damaged_archive_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "judge.npz"
    np.savez_compressed(path, **_exported(judge_head(SIZE)))
    data = bytearray(path.read_bytes())
    if content == "array":
        np.save(path.with_suffix(".npy"), np.zeros(3))
        data = bytearray(path.with_suffix(".npy").read_bytes())
    elif content == "cut":
        del data[-30:]
    else:
        data[60:90] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"judge\.npz cannot be read as \.npz"):
        load_judge(path)


def test_an_archive_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    path, sprung = tmp_path / "judge.npz", tmp_path / "sprung"
    np.savez(path, **{**_exported(judge_head(SIZE)), "mean": np.array([_Trap(sprung)], dtype=object)})
    with pytest.raises(IntegrityError, match="without pickled objects"):
        load_judge(path)
    assert not sprung.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_converter_reads_the_exported_form(tmp_path: Path, protocol: int) -> None:
    head, path = judge_head(SIZE, bias=0.1), tmp_path / "judge.pkl"
    arrays = _exported(head)
    path.write_bytes(pickle.dumps({**arrays, "thr": np.float64(0.25), "bias": np.float64(head.bias)}, protocol))
    assert _same(read_pickled_judge(path), head)
    path.write_bytes(pickle.dumps({**arrays, "weights": np.asfortranarray(arrays["weights"].T).T}, protocol))
    assert _same(read_pickled_judge(path), head)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_converter_reads_scikit_learn_without_it(tmp_path: Path, protocol: int) -> None:
    linear_model, preprocessing = (
        pytest.importorskip("sklearn.linear_model"),
        pytest.importorskip("sklearn.preprocessing"),
    )
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(60, SIZE)) * 2 + 1, generator.integers(0, 2, 60)
    scaler = preprocessing.StandardScaler().fit(x)
    model = linear_model.LogisticRegression(C=0.1).fit(scaler.transform(x), y)
    thresholds = even_quantiles(model.predict_proba(scaler.transform(x))[:, 1].tolist(), 26)
    fold = {"model": model, "scaler": scaler, "thresholds": np.array(thresholds)}
    path = tmp_path / "judge.pkl"
    path.write_bytes(pickle.dumps([fold, {"broken": 1}], protocol))
    head = read_pickled_judge(path, features="DD-DT", draft_size=2, fold=0)
    assert (head.features, head.draft_size, head.thresholds) == ("DD-DT", 2, thresholds)
    mine = head.probability(torch.as_tensor(x)).numpy()
    assert np.allclose(mine, model.predict_proba(scaler.transform(x))[:, 1], rtol=0, atol=1e-12)  # float64 rounding
    with pytest.raises(ConfigError, match=r"holds 2 heads, one per fold. Name one with --fold"):
        read_pickled_judge(path)
    with pytest.raises(IntegrityError, match="'mean' is missing"):
        read_pickled_judge(path, fold=1)


def test_the_converter_reads_torch_files(tmp_path: Path) -> None:
    head, path = judge_head(SIZE), tmp_path / "judge.pt"
    arrays = {name: torch.as_tensor(np.asarray(array, dtype=np.float64)) for name, array in _exported(head).items()}
    torch.save(arrays, path)
    assert _same(read_pickled_judge(path), head)


class _Build:
    """Pickles as given: a constructor and what it is called with."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def _hostile(sprung: Path) -> dict[str, bytes]:
    exported = _exported(judge_head(SIZE))
    objects = np.empty(SIZE, dtype=object)
    objects[:] = [_Trap(sprung)] * SIZE
    return {
        "call": pickle.dumps({**exported, "x": _Trap(sprung)}),
        "inside an array": pickle.dumps({**exported, "mean": objects}),
        "another class": pickle.dumps({**exported, "x": collections.OrderedDict()}),
        "numpy function": b"cnumpy\nfromfile\n(S'/etc/passwd'\ntR.",
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile\x93.",
        "attribute of a stand-in": b"\x80\x04\x8c\x05numpy\x8c\x17dtype.__init__.__globals__\x93.",
        "getattr": b"cbuiltins\ngetattr\n(cnumpy\ndtype\nS'__class__'\ntR.",
        "cut short": pickle.dumps(exported)[:-40],
        "persistent id": b"Psomething\n.",
        "not a pickle": b"hello",
        "empty": b"",
    }


@pytest.mark.parametrize("name", list(_hostile(Path("unused"))))
def test_the_converter_runs_nothing_of_a_hostile_pickle(tmp_path: Path, name: str) -> None:
    path, sprung = tmp_path / "judge.pkl", tmp_path / "sprung"
    path.write_bytes(_hostile(sprung)[name])
    with pytest.raises(IntegrityError) as error:
        read_pickled_judge(path)
    assert str(path) in str(error.value)
    assert not sprung.exists()


def test_the_converter_refuses_arrays_that_lie_about_their_size(tmp_path: Path) -> None:
    path = tmp_path / "judge.pkl"
    raw = pickle.dumps(_exported(judge_head(SIZE)), 2)
    shape = pickle.dumps((SIZE,), 2)[2:-1].split(b"q")[0]
    assert shape in raw
    path.write_bytes(raw.replace(shape, shape.replace(b"K\x06", b"K\xff")))
    with pytest.raises(IntegrityError, match=r"which does not fit|cannot be read"):
        read_pickled_judge(path)


def test_quantiles_are_even_from_the_lowest_to_the_highest() -> None:
    assert even_quantiles([0.3, 0.1, 0.2], 3) == pytest.approx((0.1, 0.2, 0.3))
    assert len(even_quantiles([0.5], 26)) == 26
    for values, count in (([], 26), ([0.1], 1), ([float("nan")], 26)):
        with pytest.raises(ConfigError, match="quantiles"):
            even_quantiles(values, count)
