"""The named pairs with their real weights. Minutes of model time: run with --run-model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import dropmatch
from dropmatch.config import EngineConfig
from dropmatch.eagle3.drafter import Eagle3Drafter

pytestmark = pytest.mark.model

PROMPTS = (
    "A baker sells 12 loaves a day at 3 euros each. How much does he earn in a week?",
    "Write a Python function that counts the vowels of a string.",
    "Explain in two sentences why leaves are green.",
)


def command(*arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "dropmatch.cli", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(900)
def test_lossless_on_the_small_pair_is_plain_decoding_token_for_token() -> None:
    decoder = dropmatch.load("small", dtype="float32")
    params = dropmatch.SamplingParams(max_new_tokens=80)
    plain = decoder.run(PROMPTS, params, engine=decoder.engine(rule="exact", drafter=None))
    for length in (3, 10):
        engine = decoder.engine(rule="lossless", config=EngineConfig(draft_length=length))
        drafted = decoder.run(PROMPTS, params, engine=engine)
        assert [g.tokens for g in drafted.generations] == [g.tokens for g in plain.generations]
        assert drafted.stats.requests.drafted > 0


@pytest.mark.timeout(900)
def test_the_small_pair_drafts_trees_that_pay_more_with_dropmatch() -> None:
    decoder = dropmatch.load("small", dtype="float32", draft_length=6)
    assert isinstance(decoder.drafter, Eagle3Drafter)
    params = dropmatch.SamplingParams(max_new_tokens=80)
    tau = {
        rule: decoder.run(PROMPTS, params, engine=decoder.engine(rule=rule)).stats.requests.tau
        for rule in ("lossless", "dropmatch-naive")
    }
    assert 1.5 < tau["lossless"] < tau["dropmatch-naive"]


@pytest.mark.timeout(900)
def test_random_drafts_pass_on_the_small_target_at_the_papers_p_and_not_at_auto() -> None:
    """The radius of a model with 576 hidden coordinates saturates at p_drop=0.3: a third of random tokens is kept."""
    code, wide = command("selfcheck", "--target", "small", "--rule", "dropmatch-paper", "--p-drop", "0.3")
    assert code == 1
    assert wide["share"] > 0.05
    assert wide["saturates"]
    code, fit = command("selfcheck", "--target", "small", "--rule", "dropmatch-paper", "--p-drop", "auto")
    assert code == 0
    assert fit["share"] < 0.01
    assert not fit["saturates"]
    assert fit["p_drop"] < 0.1


@pytest.mark.timeout(1800)
def test_dropmatch_keeps_more_than_lossless_on_the_default_pair() -> None:
    decoder = dropmatch.load("default", draft_length=10)
    params = dropmatch.SamplingParams(max_new_tokens=96)
    runs = {name: decoder.run(PROMPTS, params, engine=decoder.engine(rule=name)) for name in ("lossless", "dropmatch")}
    assert runs["dropmatch"].stats.requests.tau > runs["lossless"].stats.requests.tau
    assert runs["dropmatch"].stats.requests.lossy
    assert not runs["lossless"].stats.requests.lossy
