"""Facts beside results, and the cache folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dropmatch import provenance


def test_cache_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path))
    assert provenance.cache_dir() == tmp_path
    monkeypatch.delenv("DROPMATCH_CACHE")
    assert provenance.cache_dir().name == "dropmatch"


def test_facts_are_whole_and_fit_json() -> None:
    facts = provenance.collect(["dropmatch", "demo", "--pair", "a b"], device="cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["command"] == "dropmatch demo --pair 'a b'"
    assert provenance.collect(["/opt/bin/dropmatch", "demo"])["command"] == "dropmatch demo"
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert facts["cpu"]
    assert facts.keys() >= {"date", "commit", "is_dirty", "dropmatch", "python", "transformers", "num_threads"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_are_told_apart_by_a_look_at_each_tensor(tmp_path: Path, name: str) -> None:
    """Training moves every tensor, here but one of many; a copy of a folder is the same model."""
    weights = {f"layer.{i}.weight": torch.arange(4096.0).reshape(64, 64) + i for i in range(6)}

    def folder(where: str) -> Path:
        (tmp_path / where).mkdir()
        (tmp_path / where / "config.json").write_text("{}")
        (tmp_path / where / "training.log").write_text(where)
        path = tmp_path / where / name
        save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
        return tmp_path / where

    digest = provenance.weights_digest(folder("first"))
    assert provenance.weights_digest(folder("copy")) == digest
    weights["layer.3.weight"] = weights["layer.3.weight"] * 1.001
    trained = folder("trained")
    before = provenance.weights_digest(trained)
    assert before != digest
    (trained / "config.json").write_text('{"rope_theta": 1}')
    assert provenance.weights_digest(trained) != before


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository that seems to hold provenance.py."""
    file = tmp_path / "provenance.py"
    file.write_text("first")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", file.name)
    _git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(provenance, "__file__", str(file))
    return tmp_path


def test_a_checkout_tells_commit_and_changes(checkout: Path) -> None:
    facts = provenance.collect([])
    assert len(str(facts["commit"])) == 40
    assert facts["is_dirty"] is False
    (checkout / "provenance.py").write_text("changed")
    assert provenance.collect([])["is_dirty"] is True


def test_a_package_installed_inside_another_checkout_tells_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "__file__", str(checkout / "site-packages.py"))
    assert provenance.collect([])["commit"] is None


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.collect([])["commit"] is None
