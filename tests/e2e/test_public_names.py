"""The public names, pinned, and what importing them costs."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import dropmatch

NAMES = [
    "AnyOf",
    "Chunk",
    "Decoder",
    "DropMatchError",
    "DropoutConfig",
    "EngineConfig",
    "Generation",
    "Guard",
    "HeadMatch",
    "JSDivergence",
    "MajorityMatch",
    "Reason",
    "RejectionSampling",
    "RuleOptions",
    "Run",
    "SamplingParams",
    "SaturationWarning",
    "SpeculativeEngine",
    "TargetMatch",
    "hf",
    "load",
    "make_rule",
    "rule_names",
]


def test_the_public_names_are_these() -> None:
    assert dropmatch.__all__ == NAMES
    assert dropmatch.hf.__all__ == ["GenerateDecoder", "HFModel", "decoder"]


def test_every_public_name_is_there_and_documented() -> None:
    for name in NAMES:
        assert getattr(dropmatch, name).__doc__, name


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dropmatch' has no attribute 'Decodr'"):
        dropmatch.Decodr  # noqa: B018


NEEDED = {"dropmatch.integrations.lm_eval": "lm_eval"}  # modules inside a program that may be missing


def test_every_module_can_be_imported_by_itself() -> None:
    for module in pkgutil.walk_packages(dropmatch.__path__, "dropmatch."):
        extra = NEEDED.get(module.name)
        if not module.name.endswith("__main__") and (extra is None or importlib.util.find_spec(extra)):
            importlib.import_module(module.name)


HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "rich.table"}


@pytest.mark.parametrize(
    "code",
    [
        "import dropmatch",
        "import dropmatch.cli.commands",
        "import sys; from dropmatch.cli.commands import app; app(['--help'], standalone_mode=False)",
        "import sys; from dropmatch.cli.commands import app; app(['generate', '--help'], standalone_mode=False)",
    ],
)
def test_importing_and_asking_for_help_load_nothing_heavy(code: str) -> None:
    show = f"{code}\nimport sys\nprint('LOADED', *sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split("LOADED")[1].split())
    assert not loaded & (HEAVY - {"rich.table"} if "--help" in code else HEAVY)
