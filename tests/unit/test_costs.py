"""What decoding costs in counts that no machine changes, held against tests/costs.json.

A change that makes the loop run more forwards, read more of the LM head, wait for the device more often, dispatch more
operations or allocate more memory fails here and says which count grew. One that is meant is recorded by

    scripts/test tests/unit/test_costs.py --renew-costs

whose difference in tests/costs.json belongs into the commit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny
from costs import COUNTS, OF_TORCH, counted, differences
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head import MCDropoutHead
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.hf.model import HFModel
from dropmatch.ops.random import Purpose, random_bits
from toys import ListDrafter, run

Counts = dict[str, dict[str, int]]  # by case
FILE = Path(__file__).parents[1] / "costs.json"
NEW_TOKENS, LENGTH = 8, 4
P_DROP = 0.1
WRONG_EVERY = 4  # a scripted draft's tokens that are not the target's own
PROMPTS = [[5, 17, 40, 8, 100], [61, 9, 30, 200, 7, 77, 41], [12, 250], [301, 33, 2, 90, 90, 14]]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to decode. scripted: drafts named by the test instead of those of a draft model."""

    name: str
    rule: str
    batch: int
    heads: str = "full"
    is_plain: bool = False
    scripted: bool = False


CASES = [
    Case(f"{name}, batch {batch}", rule, batch, heads)
    for name, rule, heads in (
        ("lossless", "lossless", "full"),
        ("dropmatch", "dropmatch", "full"),
        ("dropmatch with a shortlist", "dropmatch", "shortlist"),
        ("dropmatch in closed form", "dropmatch-expected", "full"),
    )
    for batch in (1, 4)
]
CASES += [
    Case("plain, batch 1", "exact", 1, is_plain=True),
    Case("plain, batch 4", "exact", 4, is_plain=True),
    Case("lossless on scripted drafts, batch 1", "lossless", 1, scripted=True),
    Case("dropmatch on scripted drafts, batch 1", "dropmatch", 1, scripted=True),
    Case("dropmatch at every position of scripted drafts, batch 1", "dropmatch-paper", 1, scripted=True),
]


@cache
def _models(dtype: torch.dtype) -> tuple[HFModel, HFModel]:
    target = tiny.target()
    draft = tiny.agreeing(target)
    return HFModel(target.to(dtype), probe=False), HFModel(draft.to(dtype), probe=False)


@cache
def _own_tokens() -> list[int]:
    """The first prompt and what the target itself puts behind it."""
    target, _ = _models(torch.float32)
    engine = SpeculativeEngine(HFModel(target.model, probe=False), None, rule="exact")
    params = SamplingParams(max_new_tokens=NEW_TOKENS + LENGTH, eos_ids=())
    return [*PROMPTS[0], *run(engine, PROMPTS[:1], params)[0].tokens]


def _script(ids: Sequence[int]) -> list[int]:
    """The target's own next tokens, every fourth of them replaced by the one behind it."""
    own = _own_tokens()
    if list(ids) != own[: len(ids)]:  # a lossy token was kept: the script does not know this text
        return [own[len(ids) % len(own)]]
    places = range(len(ids), len(ids) + LENGTH)
    return [(own[i] + 1) % 320 if i % WRONG_EVERY == 0 else own[i] for i in places if i < len(own)]


def measure(case: Case) -> dict[str, int]:
    """All counts of one case, from the first prompt token to the last new one."""
    target, _ = _models(torch.float32)
    weight = target.model.get_output_embeddings().weight
    _own_tokens()  # outside what is counted, as are the constants that are made once
    random_bits(torch.zeros(1, 3, dtype=torch.int64), 1, 4, Purpose.MASK)
    engine, target, draft = _engine(case, torch.float32)
    with counted(weight, target=target.anatomy.body, drafter=draft.anatomy.body) as counts:
        _decode(engine, case)
    counts["tokens_judged"] = engine.stats.requests.drafted
    counts["positions_asked"] = engine.stats.time.head_rows
    return {name: counts[name] for name in COUNTS}


def _engine(case: Case, dtype: torch.dtype) -> tuple[SpeculativeEngine, HFModel, HFModel]:
    target, draft = (HFModel(model.model, probe=False) for model in _models(dtype))
    drafter: Any = ListDrafter(_script) if case.scripted else DraftModelDrafter(draft, target.vocab_size)
    engine = SpeculativeEngine(
        target,
        None if case.is_plain else drafter,
        rule=case.rule,
        dropout=DropoutConfig(p_drop=P_DROP, heads=case.heads, shortlist_size=64),
        config=EngineConfig(draft_length=LENGTH),
    )
    return engine, target, draft


def _decode(engine: SpeculativeEngine, case: Case) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=NEW_TOKENS, eos_ids=())
    tokens = [result.tokens for result in run(engine, PROMPTS[: case.batch], params)]
    assert [len(each) for each in tokens] == [NEW_TOKENS] * case.batch
    return tokens


def versions() -> dict[str, str]:
    """What else decides on operations and bytes."""
    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


@pytest.fixture(scope="module")
def found() -> Counts:
    return {case.name: measure(case) for case in CASES}


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest, found: Counts) -> dict[str, Any]:
    """What was recorded; recorded anew first where --renew-costs asks for it."""
    if request.config.getoption("--renew-costs"):
        FILE.write_text(json.dumps({"versions": versions(), "counts": found}, indent=1) + "\n", encoding="utf-8")
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def _without(names: Sequence[str], counts: Counts) -> Counts:
    return {case: {k: n for k, n in each.items() if k not in names} for case, each in counts.items()}


ADVICE = "\nIf this is meant, record it: scripts/test tests/unit/test_costs.py --renew-costs"


def test_no_more_work_is_done_than_recorded(recorded: dict[str, Any], found: Counts) -> None:
    lines = differences(_without(OF_TORCH, recorded["counts"]), _without(OF_TORCH, found))
    assert not lines, "\n".join(lines) + ADVICE


def test_no_more_syncs_operations_or_bytes_are_spent_than_recorded(recorded: dict[str, Any], found: Counts) -> None:
    if recorded["versions"] != versions():
        pytest.skip(f"recorded with {recorded['versions']}, and these are {versions()}")
    lines = differences(recorded["counts"], found)
    assert not lines, "\n".join(lines) + ADVICE


def test_every_recorded_case_is_measured(recorded: dict[str, Any]) -> None:
    assert list(recorded["counts"]) == [case.name for case in CASES]


def test_decisions_do_not_hang_on_rounding() -> None:
    """A near-tie could fall differently on another processor; in float64 every round falls as in float32."""
    for case in CASES:
        rounds = []
        for dtype in (torch.float32, torch.float64):
            engine, *_ = _engine(case, dtype)
            tokens, stats = _decode(engine, case), engine.stats.requests
            rounds.append((tokens, stats.rounds, stats.drafted, stats.accepted, engine.stats.time.head_rows))
        assert rounds[0] == rounds[1], case.name


def test_counts_agree_with_what_is_known_beforehand(found: Counts) -> None:
    plain = found["plain, batch 1"]
    assert plain["target_forwards"] == NEW_TOKENS + 1  # one of them the prefill
    assert plain["target_tokens"] == len(PROMPTS[0]) - 1 + NEW_TOKENS
    assert plain["head_rows"] == NEW_TOKENS
    assert plain["drafter_forwards"] == plain["positions_asked"] == plain["gathered_rows"] == 0
    script = found["dropmatch at every position of scripted drafts, batch 1"]
    rounds = script["target_forwards"] - 1
    judged = script["tokens_judged"]
    assert script["positions_asked"] == judged  # a chain asks each position once
    assert script["head_rows"] == rounds + judged + 5 * judged  # the plain head, and five paths
    assert 0 < found["dropmatch, batch 1"]["positions_asked"] < found["dropmatch, batch 1"]["tokens_judged"]
    assert found["dropmatch with a shortlist, batch 4"]["gathered_rows"] > 0
    assert found["dropmatch in closed form, batch 4"]["gathered_rows"] > 0


# -- it catches -----------------------------------------------------------------------------------------------------


DROPMATCH = next(case for case in CASES if case.name == "dropmatch, batch 1")


def _grown(found: Counts) -> list[str]:
    """What a change costs over the counts without it."""
    return differences({DROPMATCH.name: found[DROPMATCH.name]}, {DROPMATCH.name: measure(DROPMATCH)})


def _wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: Any) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def _names(lines: Sequence[str]) -> set[str]:
    assert all(line.startswith("dropmatch, batch 1: ") and " grew from " in line for line in lines)
    return {line.split(": ")[1].split(" ")[0] for line in lines}


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0, 0].item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
    ],
    ids=["item", "tolist", "bool", "cpu", "boolean index", "nonzero", "unique"],
)
def test_one_more_read_by_the_host_a_round_is_caught(monkeypatch: pytest.MonkeyPatch, found: Counts, read: Any) -> None:
    _wrap(monkeypatch, SpeculativeEngine, "_commit", lambda engine, tree, *_: read(tree.tokens))
    lines = _grown(found)
    assert "host_syncs" in _names(lines)
    rounds = found[DROPMATCH.name]["target_forwards"] - 1
    before = found[DROPMATCH.name]["host_syncs"]
    assert f"host_syncs grew from {before} to {before + rounds} " in "\n".join(lines)


@pytest.mark.parametrize(
    "send", [lambda: torch.tensor([1]), lambda: torch.as_tensor([1.0]), lambda: torch.asarray([1])]
)
def test_one_more_tensor_of_the_hosts_numbers_a_round_is_caught(
    monkeypatch: pytest.MonkeyPatch, found: Counts, send: Any
) -> None:
    _wrap(monkeypatch, SpeculativeEngine, "_commit", lambda *_: send())
    assert "host_uploads" in _names(_grown(found))


def test_a_needless_forward_is_caught(monkeypatch: pytest.MonkeyPatch, found: Counts) -> None:
    _wrap(monkeypatch, SpeculativeEngine, "_emit", lambda engine, tree, *_: engine.target.forward(tree.tokens))
    assert {"target_forwards", "target_tokens", "bytes_allocated"} <= _names(_grown(found))


def test_heads_that_are_asked_twice_are_caught(monkeypatch: pytest.MonkeyPatch, found: Counts) -> None:
    def again(head: MCDropoutHead, hidden: torch.Tensor, keys: torch.Tensor) -> None:
        head.keyed_logits(hidden, keys)

    _wrap(monkeypatch, MCDropoutHead, "__call__", again)
    names = _names(_grown(found))
    assert {"head_rows", "operations"} <= names
    assert "positions_asked" not in names


def test_a_needless_copy_is_caught(monkeypatch: pytest.MonkeyPatch, found: Counts) -> None:
    _wrap(monkeypatch, SpeculativeEngine, "_emit", lambda engine, tree, v, verdict: v.target_logits.clone())
    names = _names(_grown(found))
    assert names == {"operations", "bytes_allocated"}


def test_what_costs_nothing_is_not_counted() -> None:
    x = torch.arange(12.0).view(3, 4)
    with counted(torch.empty(2, 4), target=torch.nn.Identity()) as counts:
        x.view(4, 3).add_(1.0)
        x[:, 1]
        x.masked_fill_(x > 100, 0.0)
        x[x > 100] = 0.0
    assert +counts == Counter({"operations": counts["operations"], "bytes_allocated": 2 * 12})  # the two masks
