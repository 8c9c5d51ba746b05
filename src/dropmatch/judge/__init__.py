"""Heads for the `judge` rule: reading and writing them, and what it takes to train one.

    from dropmatch.judge import load_judge

    decoder = dropmatch.load("default", rule="dropmatch+judge", rule_options=RuleOptions(judge=load_judge("my-judge")))

Training needs scikit-learn (`pip install dropmatch[judge-training]`); decoding does not.
"""

from __future__ import annotations

from dropmatch.judge.artefact import judge_info, load_judge, save_judge

__all__ = ["judge_info", "load_judge", "save_judge"]
