"""The examples run as they stand, here on a tiny pair, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Example = Callable[..., str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def example(pair: tiny.TinyPair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Run an example with the tiny pair and return what it printed."""

    def run(name: str, *arguments: str) -> str:
        models = ["--target", str(pair.target), "--draft", str(pair.draft)]
        monkeypatch.setattr(sys, "argv", [name, *models, "--max-new-tokens", "24", *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested() -> None:
    tested = set(re.findall(r'example\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")}


def test_the_quickstart_streams_text_and_tells_reasons(example: Example) -> None:
    out = example("quickstart.py", "why is the sky blue")
    assert re.search(r"p_drop 0\.\d+; \d\.\d\d tokens per target forward", out)
    assert "kept because: exact" in out
    assert re.search(r"\d+ of 24 tokens are not the target's own choice", out)


def test_generate_with_the_lossless_rule_gives_plain_tokens(example: Example) -> None:
    out = example("transformers_generate.py")
    assert re.search(r"--- lossless: tau [\d.]+, the tokens of plain generate: True", out)
    assert "--- dropmatch: tau" in out
    assert "--- lossless" in example("transformers_generate.py", "--draft", "ngram")


def test_rules_are_compared_in_a_table(example: Example) -> None:
    lines = example("compare_rules.py").splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in lines[-7:]}
    assert rows.pop("rule") == ["tau", "lossy", "lowest", "same"]
    assert len(rows) == 6
    for rule in ("exact", "lossless"):
        assert rows[rule][1:] == ["0.0%", "3/3"]
    assert float(rows["dropmatch"][0]) >= float(rows["exact"][0])


def test_requests_of_one_batch_keep_their_own_settings(example: Example) -> None:
    out = example("batch_with_settings.py")
    heads = re.findall(r"^--- (.+)  \[(\w+), (\d+) tokens, tau ([\d.]+)\]$", out, flags=re.MULTILINE)
    assert [head[0] for head in heads][-1] == "Say hello."
    assert len(heads) == 4
    assert int(heads[-1][2]) <= 12
    assert float(heads[-1][3]) <= 3.0
    assert "tokens/s" in out


def test_a_drafter_of_ones_own_saves_forwards_and_changes_no_text(example: Example) -> None:
    out = example("own_drafter.py")
    counts = re.search(r"plain: (\d+) forwards; reciting: (\d+), tau ([\d.]+)", out)
    assert counts is not None
    assert int(counts[2]) < 0.7 * int(counts[1])
    assert "the same text: True" in out
