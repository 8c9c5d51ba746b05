"""The decoding loop on a scripted target: every row gets what it would get alone, and nothing past its end."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core import head as head_module
from dropmatch.core.acceptance import AcceptanceRule, Guard, make_rule, rule_names
from dropmatch.core.engine import Round, SpeculativeEngine
from dropmatch.core.interfaces import Drafter, DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.rivals import RIVALS
from dropmatch.core.sequence import Row
from dropmatch.core.verification import Verification
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.errors import ConfigError, UnknownNameError
from scripted import ScriptedModel
from toys import GENTLE, ListDrafter, Result, TreeDrafter, collect, run, run_one

FLOAT32 = 1e-4  # log-probabilities of float32 logits of size about 10
V = 16
NO_DROPOUT = DropoutConfig(p_drop=0.0)
CHAIN = (-1, 0, 1, 2, 3)
BUSHY = (-1, 0, 0, 1, 1, 2, 3, 6)
PROMPTS = [[1, 2, 3], [4], [5, 6]]
OUR_RULES = [name for name in rule_names() if name not in (*RIVALS, "judge")]  # which needs a trained head


def _target() -> ScriptedModel:
    return ScriptedModel(V, seed=0)


def _draft(noise: float = 0.6) -> ScriptedModel:
    return ScriptedModel(V, seed=0, noise=noise)


def _drafter(shape: str = "chain", noise: float = 0.6) -> Drafter:
    if shape == "chain":
        return DraftModelDrafter(_draft(noise), V)
    return TreeDrafter(_draft(noise), {"one branch": CHAIN, "tree": BUSHY}[shape])


def _decode(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def _one(params: SamplingParams | None = None, drafter: Drafter | None = None, **options: object) -> Result:
    return run_one(_target(), _drafter() if drafter is None else drafter, PROMPTS[0], params, **options)


def _plain(params: SamplingParams | None = None, prompt: Sequence[int] = PROMPTS[0], **options: object) -> Result:
    return run_one(_target(), None, prompt, params, rule="exact", **options)


# --- oracles that cost nothing ---


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("L", [1, 5, 10])
@pytest.mark.parametrize("rule", OUR_RULES)
def test_without_dropout_every_rule_gives_the_tokens_of_plain_greedy(rule: str, L: int, shape: str) -> None:
    config = EngineConfig(draft_length=L)
    engine = SpeculativeEngine(_target(), _drafter(shape), rule=rule, dropout=NO_DROPOUT, config=config)
    results = run(engine, PROMPTS, SamplingParams(max_new_tokens=23))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == _target().greedy(prompt, 23)
    alone = _one(SamplingParams(max_new_tokens=23), _drafter(shape), rule=rule, dropout=NO_DROPOUT, config=config)
    assert alone.tokens == results[0].tokens
    assert alone.reasons == results[0].reasons
    if rule not in ("js", "expected-js"):  # Eq. 6 at radius 0 keeps equal distributions only
        assert engine.stats.requests.accepted > 0


@pytest.mark.parametrize("rule", ["exact", "lossless"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_lossless_rules_give_plain_greedy_at_any_dropout(rule: str, shape: str) -> None:
    engine = SpeculativeEngine(_target(), _drafter(shape), rule=rule, dropout=DropoutConfig(p_drop=0.3))
    for prompt, result in zip(PROMPTS, run(engine, PROMPTS, SamplingParams(max_new_tokens=20)), strict=True):
        assert result.tokens == _target().greedy(prompt, 20)
    assert engine.head.rows_asked == 0
    assert engine.stats.requests.lossy == []


@pytest.mark.parametrize("rule", ["exact", "js", "dropmatch", "dropmatch-paper"])
def test_target_as_its_own_drafter_keeps_every_token(rule: str) -> None:
    """Seed 0, K=20: Eq. 6 keeps its own distribution but for a chance below 1e-6 a position (see test_rules)."""
    result = _one(
        SamplingParams(max_new_tokens=36),
        DraftModelDrafter(_target(), V),
        rule=rule,
        dropout=DropoutConfig(p_drop=0.1, num_paths=20),
    )
    assert result.tokens == _target().greedy(PROMPTS[0], 36)
    assert result.stats.accepted == result.stats.drafted == 30
    assert result.stats.tau == 6.0  # draft length 5 and the bonus token


@pytest.mark.parametrize("drafter", [None, "chain"])
def test_empty_drafts_equal_plain_decoding(drafter: str | None) -> None:
    chosen = None if drafter is None else _drafter()
    result = run_one(_target(), chosen, PROMPTS[0], SamplingParams(max_new_tokens=15, draft_length=0))
    assert result.tokens == _target().greedy(PROMPTS[0], 15)
    assert set(result.reasons) == {Reason.BONUS}
    assert result.stats.rounds == 15
    assert result.stats.drafted == 0
    assert result.stats.tau == 1.0


@pytest.mark.parametrize("rule", ["dropmatch", "dropmatch-naive", "exact"])
def test_one_branch_tree_equals_the_chain(rule: str) -> None:
    params = SamplingParams(max_new_tokens=40, logprobs=True)
    config = EngineConfig(draft_length=4)
    chain = _one(params, _drafter("chain"), rule=rule, config=config)
    tree = _one(params, _drafter("one branch"), rule=rule, config=config)
    assert tree.tokens == chain.tokens
    assert tree.reasons == chain.reasons
    assert tree.logprobs == pytest.approx(chain.logprobs, abs=FLOAT32)
    assert tree.stats.accepted_at == chain.stats.accepted_at


def test_trees_keep_at_least_what_their_first_branch_would() -> None:
    config = EngineConfig(draft_length=4)
    for seed in range(10):
        accepted = {}
        for shape in (CHAIN, (*CHAIN, 0, 1, 5)):
            engine = SpeculativeEngine(_target(), TreeDrafter(_draft(), shape), rule="dropmatch", config=config)
            engine.add([seed, 3], SamplingParams(seed=seed))
            (chunk,) = engine.step()
            accepted[shape] = len(chunk.tokens)
        assert accepted[*CHAIN, 0, 1, 5] >= accepted[CHAIN]


def test_naive_depth_grows_with_the_number_of_nested_paths() -> None:
    """The first K masks of a position are the same for every larger K."""
    grew = False
    for seed in range(12):
        depths = []
        for K in (1, 2, 4, 8, 16):
            dropout = DropoutConfig(num_paths=K, p_drop=0.2)
            engine = SpeculativeEngine(_target(), _drafter(noise=1.0), rule="dropmatch-naive", dropout=dropout)
            engine.add([seed, 7], SamplingParams(seed=seed))
            (chunk,) = engine.step()
            depths.append(len(chunk.tokens))
        assert depths == sorted(depths)
        grew |= depths[-1] > depths[0]
    assert grew


def test_dropmatch_never_keeps_less_than_lossless_greedy_in_a_round() -> None:
    longer = 0
    for seed, shape in itertools.product(range(12), ("chain", "tree")):
        accepted = {}
        for rule in ("lossless", "dropmatch"):
            engine = SpeculativeEngine(_target(), _drafter(shape), rule=rule, dropout=GENTLE)
            engine.add([seed, 3], SamplingParams(seed=seed))
            (chunk,) = engine.step()
            accepted[rule] = len(chunk.tokens)
        assert accepted["dropmatch"] >= accepted["lossless"]
        longer += accepted["dropmatch"] > accepted["lossless"]
    assert longer > 0


def test_cache_holds_the_row_without_its_last_token_after_every_step() -> None:
    for shape in ("chain", "tree"):
        target = _target()
        engine = SpeculativeEngine(target, _drafter(shape), dropout=GENTLE)
        ids = {engine.add(prompt, SamplingParams(max_new_tokens=20 + len(prompt))): list(prompt) for prompt in PROMPTS}
        while engine.has_work:
            alive = []
            for chunk in engine.step():
                ids[chunk.request] += chunk.tokens
                if chunk.finish_reason is None:
                    alive.append(chunk.request)
            assert target.rows == [ids[request][:-1] for request in alive]


# --- a row is on its own ---


def _varied() -> list[tuple[list[int], SamplingParams]]:
    return [
        ([1, 2, 3], SamplingParams(max_new_tokens=30, logprobs=True)),
        ([4], SamplingParams(max_new_tokens=7, rule="exact", draft_length=2)),
        ([5, 6], SamplingParams(max_new_tokens=25, temperature=0.9, seed=3, rule="lossless", logprobs=True)),
        ([7, 8, 9, 10], SamplingParams(max_new_tokens=40, stop=("ab", "h"), seed=9)),
        ([2, 2], SamplingParams(max_new_tokens=40, eos_ids=(3, 11), rule="dropmatch-naive")),
        ([3], SamplingParams(max_new_tokens=20, temperature=1.2, top_k=5, seed=4, stream=2)),
        ([9, 1], SamplingParams(max_new_tokens=20, repetition_penalty=1.5, rule="dropmatch-paper", seed=8)),
        ([9, 1], SamplingParams(max_new_tokens=20, draft_length=0)),
        ([0, 1], SamplingParams(max_new_tokens=18, min_new_tokens=10, eos_ids=tuple(range(8)), temperature=0.7)),
        ([6], SamplingParams(max_new_tokens=1)),
        ([8, 8], SamplingParams(max_new_tokens=20, rule=Guard(make_rule("dropmatch"), 0.1), suppress_tokens=(1, 2))),
        ([8, 9], SamplingParams(max_new_tokens=20, rule="js+majority", draft_length=9, seed=77)),
    ]


def _assert_same(got: Result, alone: Result) -> None:
    assert got.tokens == alone.tokens
    assert got.reasons == alone.reasons
    assert got.text == alone.text
    assert got.finish_reason == alone.finish_reason
    assert got.logprobs == pytest.approx(alone.logprobs, abs=FLOAT32)
    assert (got.stats.rounds, got.stats.drafted, got.stats.accepted) == (
        alone.stats.rounds,
        alone.stats.drafted,
        alone.stats.accepted,
    )


@pytest.fixture(scope="module")
def singles() -> dict[str, list[Result]]:
    return {
        shape: [
            run_one(_target(), _drafter(shape), prompt, params, decode=_decode, eos_ids=(15,))
            for prompt, params in _varied()
        ]
        for shape in ("chain", "tree")
    }


@pytest.mark.parametrize(
    ("shape", "max_batch", "order"),
    [("chain", 32, 1), ("chain", 3, 1), ("chain", 5, -1), ("chain", 1, 1), ("tree", 32, -1), ("tree", 4, 1)],
)
def test_row_result_does_not_depend_on_batch_mates(
    singles: dict[str, list[Result]], shape: str, max_batch: int, order: int
) -> None:
    """Draft length, sampling, rule, seed, stop strings, EOS ids and caps all differ; rows wait, join and leave."""
    config = EngineConfig(max_batch=max_batch)
    engine = SpeculativeEngine(_target(), _drafter(shape), dropout=GENTLE, config=config, decode=_decode, eos_ids=(15,))
    prompts, params = zip(*_varied()[::order], strict=True)
    for got, alone in zip(run(engine, prompts, params), singles[shape][::order], strict=True):
        _assert_same(got, alone)


@pytest.mark.parametrize("seed", range(8))
def test_rows_may_join_and_leave_at_any_step(singles: dict[str, list[Result]], seed: int) -> None:
    """A random schedule of arrivals and cancellations; each row still gets what it gets alone."""
    chance = random.Random(seed)
    cases = _varied()
    engine = SpeculativeEngine(
        _target(),
        _drafter(),
        dropout=GENTLE,
        config=EngineConfig(max_batch=chance.randint(1, 5)),
        decode=_decode,
        eos_ids=(15,),
    )
    waiting = chance.sample(range(len(cases)), len(cases))
    numbers: dict[int, int] = {}
    cancelled: set[int] = set()
    chunks = []
    while waiting or engine.has_work:
        for _ in range(chance.randint(0, 2)):
            if waiting:
                case = waiting.pop()
                numbers[engine.add(*cases[case])] = case
        chunks += engine.step()
        if numbers and chance.random() < 0.1:
            request = chance.choice(sorted(numbers))
            if engine.cancel(request):
                cancelled.add(request)
    results = collect(chunks)
    assert len(cancelled) < len(cases)
    for request, case in numbers.items():
        alone = singles["chain"][case]
        if request in cancelled:
            got = results.get(request, Result())
            assert got.tokens == alone.tokens[: len(got.tokens)]
            assert got.finish_reason is None
        else:
            _assert_same(results[request], alone)


class _Recorder:
    """Wraps a rule and notes every decision by (prefix, drafted token)."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.needs = rule.needs
        self.couples_draft = rule.couples_draft
        self.decisions: dict[tuple[tuple[int, ...], int], int] = {}

    def judge(self, v: Verification, ask: torch.Tensor) -> torch.Tensor:
        codes = self.rule.judge(v, ask)
        for b, n in ask.nonzero().tolist():
            path = v.tree.ancestors[b, n].nonzero()[1:-1, 0].tolist()
            prefix = (*v.sampling.rows[b].ids, *v.tree.tokens[b, path].tolist())
            key = (prefix, int(v.tree.tokens[b, n]))
            assert self.decisions.setdefault(key, int(codes[b, n])) == int(codes[b, n])
        return codes

    def next_token(self, v: Verification, node: torch.Tensor) -> torch.Tensor:
        return self.rule.next_token(v, node)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["dropmatch", "dropmatch-naive", "exact"])
def test_decisions_do_not_depend_on_the_draft_length(name: str, temperature: float) -> None:
    """Two runs of one seed with other draft lengths and batch mates meet the same prefix: the same decision."""
    recorders = []
    for L, mates in ((2, []), (5, [[3, 3], [4]]), (9, [[5]])):
        recorder = _Recorder(make_rule(name))
        engine = SpeculativeEngine(
            _target(), _drafter(), rule=recorder, dropout=GENTLE, config=EngineConfig(draft_length=L)
        )
        run(engine, [*mates, [1, 2, 3]], SamplingParams(max_new_tokens=30, temperature=temperature, seed=6))
        recorders.append(recorder.decisions)
    for a, b in itertools.combinations(recorders, 2):
        common = a.keys() & b.keys()
        assert len(common) >= 2  # at least the start is shared
        assert all(a[key] == b[key] for key in common)


@pytest.mark.parametrize(("sharing", "distinct"), [("position", 6), ("round", 2), ("fixed", 1)])
def test_masks_are_shared_as_asked(monkeypatch: pytest.MonkeyPatch, sharing: str, distinct: int) -> None:
    """Two rounds of three drafted tokens each, judged by heads alone."""
    seen: list[tuple[int, ...]] = []
    original = head_module.dropout_masks

    def record(keys: torch.Tensor, K: int, d: int, p_drop: float) -> torch.Tensor:
        seen.extend(tuple(key) for key in keys.tolist())
        return original(keys, K, d, p_drop)

    monkeypatch.setattr(head_module, "dropout_masks", record)
    dropout = DropoutConfig(p_drop=0.001, mask_sharing=sharing)
    drafter = DraftModelDrafter(_target(), V)
    engine = SpeculativeEngine(
        _target(), drafter, rule="dropmatch-naive", dropout=dropout, config=EngineConfig(draft_length=3)
    )
    engine.add([1, 2], SamplingParams(max_new_tokens=20))
    assert [len(chunk.tokens) for chunk in (*engine.step(), *engine.step())] == [4, 4]
    assert len(seen) == 6
    assert len(set(seen)) == distinct


def test_equal_seeds_give_equal_results_and_streams_differ() -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5)
    engine = SpeculativeEngine(_target(), _drafter(), dropout=GENTLE)
    a, b, c = run(engine, [[1, 2]] * 3, [params, params, replace(params, stream=1)])
    assert a.tokens == b.tokens
    assert a.tokens != c.tokens


def test_requests_without_a_seed_are_keyed_by_engine_seed_and_number() -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=None)

    def both(seed: int, max_batch: int) -> list[list[int]]:
        config = EngineConfig(seed=seed, max_batch=max_batch)
        engine = SpeculativeEngine(_target(), _drafter(), dropout=GENTLE, config=config)
        return [result.tokens for result in run(engine, [[1, 2]] * 2, params)]

    first = both(0, 2)
    assert first[0] != first[1]
    assert both(0, 1) == first
    assert both(1, 2) != first


# --- ends of rows ---

_GREEDY = ScriptedModel(V, seed=0).greedy(PROMPTS[0], 60)
SELF = {"rule": "exact", "config": EngineConfig(draft_length=8)}  # with the target as drafter: bursts of nine


def _self(params: SamplingParams, **options: object) -> Result:
    return _one(params, DraftModelDrafter(_target(), V), **SELF, **options)


def _first_new(after: int) -> int:
    """A place past `after` whose token did not occur before, as an end marker needs."""
    return next(i for i in range(after, 60) if _GREEDY[i] not in _GREEDY[:i])


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_string_in_the_middle_of_a_burst_cuts_text_ids_and_logprobs(include_stop: bool) -> None:
    """The string is split over two tokens and completed inside an accepted burst; nothing behind it gets out."""
    at = next(i for i in range(2, 8) if _decode(_GREEDY).find(_decode(_GREEDY[i : i + 2])) == i)
    stop = _decode(_GREEDY[at : at + 2])
    params = SamplingParams(max_new_tokens=50, stop=("never", stop), include_stop=include_stop, logprobs=True)
    result = _self(params, decode=_decode)
    assert result.finish_reason == "stop"
    assert result.tokens == _GREEDY[: at + 2]
    assert len(result.logprobs) == len(result.reasons) == at + 2
    assert result.text == _decode(_GREEDY[: at + 2 if include_stop else at])
    assert result.stats.emitted == at + 2
    assert result.stats.tau == 9.0  # tau counts whole rounds, also the one that was cut


def test_text_that_may_become_a_stop_string_is_held_over_steps() -> None:
    target = _target()
    greedy = _decode(_GREEDY)
    stop = greedy[3:6] + "!"  # begins like the text but never completes
    engine = SpeculativeEngine(target, _drafter(), rule="exact", decode=_decode)
    engine.add(PROMPTS[0], SamplingParams(max_new_tokens=40, stop=(stop,), draft_length=0))
    shown = ""
    for count in range(1, 41):
        (chunk,) = engine.step()
        shown += chunk.text
        assert greedy.startswith(shown)
        assert count - len(shown) < len(stop)
        if count == 6:
            assert len(shown) == 3
    assert shown == greedy[:40]


@pytest.mark.parametrize("rule", ["exact", "dropmatch"])
@pytest.mark.parametrize("stop", [(), ("ka", "b")])
def test_streamed_chunks_join_to_the_whole_text(rule: str, stop: tuple[str, ...]) -> None:
    for seed in range(6):
        params = SamplingParams(max_new_tokens=30, stop=stop, seed=seed, temperature=0.8)
        result = _one(params, rule=rule, decode=_decode)
        text = _decode(result.tokens)
        cuts = [text.find(s) for s in stop if s in text]
        assert result.text == (text[: min(cuts)] if cuts else text)
        assert (result.finish_reason == "stop") == bool(cuts)
        assert [token for chunk in result.chunks for token in chunk.tokens] == result.tokens


def test_end_of_sequence_in_a_burst_ends_the_row_there() -> None:
    at = _first_new(1)
    result = _self(SamplingParams(max_new_tokens=50), eos_ids=(_GREEDY[at],), decode=_decode)
    assert result.tokens == _GREEDY[: at + 1]
    assert result.finish_reason == "eos"
    assert result.text == _decode(_GREEDY[:at])
    assert len(result.chunks) == at // 9 + 1


@pytest.mark.parametrize(("cap_after", "reason", "length"), [(1, "eos", 0), (0, "eos", 0), (-1, "length", -1)])
def test_end_inside_the_budget_beats_the_length_cap(cap_after: int, reason: str, length: int) -> None:
    """EOS and the cap fall into one burst: one before, on, and behind the cap."""
    at = _first_new(3)
    params = SamplingParams(max_new_tokens=at + 1 + cap_after, eos_ids=(_GREEDY[at],))
    result = _self(params)
    assert result.finish_reason == reason
    assert result.tokens == _GREEDY[: at + 1 + length]


def test_several_end_ids_and_none_at_all() -> None:
    late, early = _first_new(4), _first_new(1)
    both = _self(SamplingParams(max_new_tokens=50, eos_ids=(_GREEDY[late], _GREEDY[early])))
    assert both.tokens == _GREEDY[: early + 1]
    ignored = _self(SamplingParams(max_new_tokens=50, eos_ids=()), eos_ids=(_GREEDY[early],))
    assert ignored.tokens == _GREEDY[:50]
    assert ignored.finish_reason == "length"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 8, 9, 10, 17])
def test_never_more_tokens_than_asked_for(max_new_tokens: int) -> None:
    result = _self(SamplingParams(max_new_tokens=max_new_tokens))
    assert result.tokens == _GREEDY[:max_new_tokens]
    assert result.finish_reason == "length"


def test_stop_check_ends_the_row_without_overshoot() -> None:
    """A custom criterion that wants seven tokens gets seven, though bursts are nine long."""
    result = _self(SamplingParams(max_new_tokens=50, stop_checks=(lambda ids: len(ids) - len(PROMPTS[0]) >= 7,)))
    assert result.tokens == _GREEDY[:7]
    assert result.finish_reason == "stop"


def test_length_limit_of_the_engine_counts_the_prompt() -> None:
    result = run_one(
        _target(), _drafter(), [1, 2, 3], SamplingParams(max_new_tokens=50), config=EngineConfig(max_length=10)
    )
    assert len(result.tokens) == 7
    assert result.finish_reason == "length"


def test_prompt_of_one_token_is_decoded_like_any_other() -> None:
    for shape in ("chain", "tree"):
        result = run_one(_target(), _drafter(shape), [4], SamplingParams(max_new_tokens=12), rule="exact")
        assert result.tokens == _target().greedy([4], 12)


def test_cancelled_requests_get_nothing_more() -> None:
    engine = SpeculativeEngine(_target(), _drafter(), dropout=GENTLE, config=EngineConfig(max_batch=1))
    first, second, third = (engine.add(prompt, SamplingParams(max_new_tokens=10)) for prompt in PROMPTS)
    engine.step()
    assert engine.cancel(first)  # in flight
    assert engine.cancel(second)  # waiting
    assert not engine.cancel(first)
    assert not engine.cancel(99)
    assert {chunk.request for chunk in engine.run()} == {third}
    assert not engine.cancel(third)
    assert engine.step() == []
    assert not engine.has_work


# --- reasons, corrections, guards ---


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("rule", OUR_RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_token_has_a_reason_that_its_rule_can_give(rule: str, shape: str, temperature: float) -> None:
    own = {
        "exact": {Reason.EXACT},
        "js": {Reason.JS},
        "majority": {Reason.MAJORITY},
        "head": {Reason.HEAD},
        "lossless": {Reason.EXACT} if temperature == 0 else {Reason.RATIO},
        "dropmatch": {Reason.EXACT, Reason.JS, Reason.MAJORITY},
        "dropmatch-paper": {Reason.JS, Reason.MAJORITY},
        "dropmatch-naive": {Reason.HEAD},
        "expected-head": {Reason.EXPECTED_HEAD},
        "expected-js": {Reason.EXPECTED_JS},
        "expected-majority": {Reason.EXPECTED_MAJORITY},
        "dropmatch-expected": {Reason.EXACT, Reason.EXPECTED_JS, Reason.EXPECTED_MAJORITY},
    }[rule]
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    result = _one(params, _drafter(shape), rule=rule)
    assert len(result.reasons) == len(result.tokens) == 40
    assert set(result.reasons) <= own | {Reason.BONUS, Reason.RECOVERED}
    assert result.stats.reasons.total() == result.stats.emitted == 40
    for chunk in result.chunks[:-1]:
        assert chunk.reasons[-1] in (Reason.BONUS, Reason.RECOVERED)
        assert all(reason in own for reason in chunk.reasons[:-1])
    assert all((chunk.stats is None) == (chunk.finish_reason is None) for chunk in result.chunks)


def test_lossy_tokens_are_recorded_with_their_probabilities() -> None:
    result = _one(SamplingParams(max_new_tokens=60, seed=1), _drafter(noise=1.0), dropout=DropoutConfig(p_drop=0.15))
    assert result.stats.lossy
    by_index = {entry.index: entry for entry in result.stats.lossy}
    model = _target()
    for i, (token, reason) in enumerate(zip(result.tokens, result.reasons, strict=True)):
        probs = model.head(model.state([*PROMPTS[0], *result.tokens[:i]])).softmax(-1)
        is_lossy = int(probs.argmax()) != token
        assert is_lossy == (i in by_index)
        if is_lossy:
            entry = by_index[i]
            assert (entry.token, entry.best_token, entry.reason) == (token, int(probs.argmax()), reason)
            assert entry.prob == pytest.approx(float(probs[token]), abs=FLOAT32)
            assert entry.best_prob == pytest.approx(float(probs.max()), abs=FLOAT32)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_logprobs_are_the_targets_own(shape: str) -> None:
    result = _one(SamplingParams(max_new_tokens=30, logprobs=True), _drafter(shape))
    model = _target()
    for i, (token, logprob) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        expected = model.head(model.state([*PROMPTS[0], *result.tokens[:i]])).log_softmax(-1)[token]
        assert logprob == pytest.approx(float(expected), abs=FLOAT32)
    assert _one(SamplingParams(max_new_tokens=3)).chunks[0].logprobs is None


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("correction", ["plain", "centroid", "head1", "mode"])
def test_corrections_without_dropout_are_plain(correction: str, shape: str) -> None:
    config = EngineConfig(correction=correction)
    result = _one(SamplingParams(max_new_tokens=25), _drafter(shape), dropout=NO_DROPOUT, config=config)
    assert result.tokens == _GREEDY[:25]


def test_corrections_with_dropout_take_recovered_tokens_from_the_heads() -> None:
    dropout = DropoutConfig(p_drop=0.5, num_paths=3)
    model = _target()

    def recovered_argmax_share(correction: str, rule: str = "dropmatch-naive") -> float:
        same = total = 0
        for seed in range(4):
            result = _one(
                SamplingParams(max_new_tokens=40, seed=seed),
                _drafter(noise=3.0),
                rule=rule,
                dropout=dropout,
                config=EngineConfig(correction=correction),
            )
            for i, (token, reason) in enumerate(zip(result.tokens, result.reasons, strict=True)):
                best = int(model.head(model.state([*PROMPTS[0], *result.tokens[:i]])).argmax())
                if reason == Reason.BONUS:
                    assert token == best
                if reason == Reason.RECOVERED:
                    same, total = same + (token == best), total + 1
        return same / total

    assert recovered_argmax_share("plain") == 1.0
    assert recovered_argmax_share("head1") < 0.9
    assert recovered_argmax_share("mode") < 1.0
    assert recovered_argmax_share("centroid") < 1.0
    assert recovered_argmax_share("head1", rule="exact") == 1.0


def _ends(protect: bool, rule: str) -> list[tuple[Reason, bool]]:
    """How rows ended by EOS: its reason, and whether the target's argmax was EOS there."""
    ends = []
    model = _target()
    for seed in range(40):
        prompt = [seed % V, seed // V, 3]
        result = run_one(
            _target(),
            _drafter(noise=1.0),
            prompt,
            SamplingParams(max_new_tokens=30, seed=seed),
            rule=rule,
            dropout=DropoutConfig(p_drop=0.15),
            config=EngineConfig(protect_eos=protect),
            eos_ids=(0, 1, 2, 3),
        )
        if result.finish_reason == "eos":
            best = int(model.head(model.state([*prompt, *result.tokens[:-1]])).argmax())
            ends.append((result.reasons[-1], best == result.tokens[-1]))
    return ends


@pytest.mark.parametrize("rule", ["dropmatch", "dropmatch-paper", "dropmatch-naive"])
def test_protected_end_of_sequence_needs_the_targets_argmax(rule: str) -> None:
    assert not all(is_own for _, is_own in _ends(False, rule))
    protected = _ends(True, rule)
    assert protected
    assert all(is_own for _, is_own in protected)


def test_protection_keeps_a_drafted_end_that_the_target_agrees_with() -> None:
    """Whatever rule speaks for it. Only the code EXACT once counted, so that under other rules the end was dropped and
    left to the correction, which need not be the target's argmax."""
    reasons = {reason for reason, _ in _ends(True, "dropmatch-naive")}
    assert Reason.HEAD in reasons


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_guarded_rows_keep_no_lossy_token_below_the_floor(shape: str) -> None:
    params = SamplingParams(max_new_tokens=60, seed=2)
    dropout = DropoutConfig(p_drop=0.15)
    free = _one(params, _drafter(shape, noise=1.0), dropout=dropout)
    rule = Guard(make_rule("dropmatch"), 0.1)
    guarded = _one(params, _drafter(shape, noise=1.0), rule=rule, dropout=dropout)
    assert min(entry.prob for entry in free.stats.lossy) < 0.1
    assert all(entry.prob >= 0.1 for entry in guarded.stats.lossy)


def test_guard_of_one_is_lossless() -> None:
    result = _one(SamplingParams(max_new_tokens=30), rule=Guard(make_rule("dropmatch"), min_ratio=1.0))
    assert result.tokens == _GREEDY[:30]


# --- drafters without a distribution, processors ---


def test_point_mass_drafts_pass_all_rules_of_the_preset() -> None:
    """n-gram-like drafts have no distribution: Eq. 6 compares a point mass, the other rules go by the token."""
    oracle = _target()
    drafter = ListDrafter(lambda ids: oracle.greedy(ids, 5))
    for name in ("exact", "dropmatch", "dropmatch-paper", "dropmatch-naive", "lossless"):
        result = _one(SamplingParams(max_new_tokens=30), drafter, rule=name)
        assert len(result.tokens) == 30
        assert result.stats.accepted > 0
    assert _one(SamplingParams(max_new_tokens=30), drafter, rule="lossless").tokens == _GREEDY[:30]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ngram_drafts_leave_the_exact_rule_lossless(temperature: float) -> None:
    params = SamplingParams(max_new_tokens=60, temperature=temperature, top_k=2)
    drafter = NgramDrafter(torch.device("cpu"))
    result = _one(params, drafter, rule="exact")
    assert result.tokens == _plain(params).tokens
    assert result.stats.drafted > 0
    assert len(_one(params, NgramDrafter(torch.device("cpu"))).tokens) == 60


def _ban_repeats_of_last(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.scatter(-1, ids[:, -1:], float("-inf"))


PROCESSED = {
    "repetition penalty": SamplingParams(max_new_tokens=30, repetition_penalty=1.7),
    "minimum": SamplingParams(max_new_tokens=30, min_new_tokens=12, eos_ids=tuple(range(12))),
    "suppressed": SamplingParams(max_new_tokens=30, suppress_tokens=(_GREEDY[0], _GREEDY[3], 5)),
    "custom": SamplingParams(max_new_tokens=30, processors=(_ban_repeats_of_last,)),
    "all": SamplingParams(
        max_new_tokens=30,
        repetition_penalty=1.3,
        min_new_tokens=8,
        eos_ids=(1, 2, 3),
        suppress_tokens=(5,),
        processors=(_ban_repeats_of_last,),
    ),
}


def _slow_plain(params: SamplingParams) -> list[int]:
    """Plain greedy decoding with the processing written out."""
    model, ids = _target(), list(PROMPTS[0])
    for _ in range(params.max_new_tokens):
        logits = model.head(model.state(ids)).clone()
        for token in set(ids):
            factor = params.repetition_penalty
            logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        banned = list(params.suppress_tokens)
        if len(ids) - len(PROMPTS[0]) < params.min_new_tokens:
            banned += params.eos_ids
        logits[banned] = float("-inf")
        for processor in params.processors:
            logits = processor(torch.tensor([ids]), logits[None])[0]
        ids.append(int(logits.argmax()))
        if ids[-1] in (params.eos_ids or ()):
            break
    return ids[len(PROMPTS[0]) :]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", PROCESSED)
def test_processors_with_a_drafter_equal_plain_decoding(name: str, shape: str) -> None:
    params = PROCESSED[name]
    expected = _slow_plain(params)
    assert expected != _GREEDY[: len(expected)]
    for rule, dropout in (("exact", GENTLE), ("lossless", GENTLE), ("dropmatch", NO_DROPOUT)):
        result = _one(params, _drafter(shape), rule=rule, dropout=dropout)
        assert result.tokens == expected, rule
        assert result.stats.accepted > 0


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("rule", ["exact", "dropmatch-naive"])
def test_processors_at_temperature_with_a_drafter_equal_plain_sampling(name: str, rule: str) -> None:
    params = replace(PROCESSED[name], temperature=0.9, top_p=0.95, seed=4)
    dropout = NO_DROPOUT if rule == "dropmatch-naive" else GENTLE
    assert _one(params, rule=rule, dropout=dropout).tokens == _plain(params).tokens


@pytest.mark.parametrize("name", PROCESSED)
def test_lossy_rules_never_emit_what_a_processor_masks(name: str) -> None:
    params = PROCESSED[name]
    for seed, correction in itertools.product(range(3), ("plain", "centroid", "head1", "mode")):
        result = _one(
            replace(params, seed=seed),
            _drafter(noise=1.0),
            dropout=DropoutConfig(p_drop=0.15),
            config=EngineConfig(correction=correction),
        )
        assert not set(result.tokens) & set(params.suppress_tokens)
        ids = [*PROMPTS[0], *result.tokens]
        if params.processors:
            assert all(a != b for a, b in itertools.pairwise(ids[len(PROMPTS[0]) - 1 :]))
        ends = [i for i, token in enumerate(result.tokens) if token in (params.eos_ids or ())]
        assert all(i >= params.min_new_tokens for i in ends)


class _Spy(DraftModelDrafter):
    """Keeps what was proposed."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model, V)
        self.proposed: list[tuple[list[int], DraftTree]] = []

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        tree = super().propose(rows, max_new)
        self.proposed.append((list(rows[0].ids), tree))
        return tree


def test_recorded_draft_distribution_is_the_processed_one() -> None:
    """Rules must see what the draft was drawn from, not the drafter's raw logits."""
    drafter = _Spy(_draft())
    params = SamplingParams(max_new_tokens=20, suppress_tokens=(2, 9), processors=(_ban_repeats_of_last,))
    _one(replace(params, temperature=1.0), drafter, rule="lossless")
    model = _draft()
    for ids, tree in drafter.proposed:
        for n in range(tree.tokens.shape[1] - 1):
            prefix = [*ids, *tree.tokens[0, 1 : n + 1].tolist()]
            expected = model.head(model.state(prefix)).clone()
            expected[[2, 9, prefix[-1]]] = float("-inf")
            assert torch.allclose(tree.child_logits[0, n], expected, atol=1e-5)
            assert tree.child_logits[0, n, tree.tokens[0, n + 1]] > float("-inf")
        assert bool(tree.is_sampled.all())


# --- errors and statistics ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.add([]), ConfigError, "The prompt is empty"),
        (lambda e: e.add([1, 16]), ConfigError, r"token id 16 is outside the target's vocabulary \[0, 16\)"),
        (lambda e: e.add([-1]), ConfigError, "token id -1 is outside"),
        (lambda e: e.add([1], SamplingParams(stop=("x",))), ConfigError, "stop strings need a tokenizer"),
        (lambda e: e.add([1] * 30), ConfigError, "has 30 tokens and leaves no room below the limit of 30"),
        (lambda e: e.add([1], SamplingParams(rule="exat")), UnknownNameError, "Did you mean 'exact'"),
        (lambda e: e.add([1], SamplingParams(rule="lossless+js")), ConfigError, "joins 'lossless'"),
    ],
)
def test_bad_requests_are_refused_before_they_queue(
    call: Callable[[SpeculativeEngine], int], error: type[Exception], message: str
) -> None:
    """A refused request takes no number either: the keys of rows without a seed hang on it."""
    engine = SpeculativeEngine(_target(), _drafter(), config=EngineConfig(max_length=30))
    with pytest.raises(error, match=message):
        call(engine)
    assert not engine.has_work
    assert engine.add([1, 2]) == 0


def test_unsettled_drop_rate_and_unknown_rule_are_refused_when_the_engine_is_built() -> None:
    with pytest.raises(ConfigError, match="choose_p_drop"):
        SpeculativeEngine(_target(), None, dropout=DropoutConfig(p_drop="auto"))
    with pytest.raises(UnknownNameError, match="Available: "):
        SpeculativeEngine(_target(), None, rule="none")


def test_engine_counts_are_the_sum_over_requests() -> None:
    engine = SpeculativeEngine(_target(), _drafter(), dropout=GENTLE, config=EngineConfig(max_batch=2))
    prompts, params = zip(*[case for case in _varied() if not case[1].stop], strict=True)
    results = run(engine, prompts, params)
    pooled = engine.stats.requests
    for name in ("rounds", "drafted", "accepted", "emitted"):
        assert getattr(pooled, name) == sum(getattr(result.stats, name) for result in results), name
    assert pooled.tau == pytest.approx(
        sum(r.stats.accepted + r.stats.rounds for r in results) / sum(r.stats.rounds for r in results)
    )
    assert pooled.reasons.total() == pooled.emitted
    assert engine.stats.time.head_rows == engine.head.rows_asked
    json.dumps(engine.stats.to_json(), allow_nan=False)


def test_heads_are_asked_only_where_the_exact_rule_says_no() -> None:
    engine = SpeculativeEngine(_target(), _drafter(), rule="dropmatch", dropout=GENTLE)
    run(engine, [PROMPTS[0]], SamplingParams(max_new_tokens=50))
    stats = engine.stats.requests
    assert 0 < engine.head.rows_asked <= stats.drafted - stats.reasons[Reason.EXACT]


def test_a_drafter_slower_than_its_gain_is_said_so() -> None:
    class Slow(DraftModelDrafter):
        def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
            time.sleep(0.02)
            return super().propose(rows, max_new)

    engine = SpeculativeEngine(_target(), Slow(_draft(), V), rule="exact")
    run(engine, [PROMPTS[0]], SamplingParams(max_new_tokens=10))
    assert engine.stats.predicted_speedup < 1.0
    assert "Speculation does not pay here" in engine.stats.hint()
    assert engine.stats.time.draft > engine.stats.time.target
    assert math.isfinite(engine.stats.tokens_per_second)


def test_one_target_forward_serves_all_rows_of_a_round() -> None:
    target = _target()
    engine = SpeculativeEngine(target, _drafter(), dropout=GENTLE)
    results = run(engine, PROMPTS, SamplingParams(max_new_tokens=20))
    assert target.forwards == max(result.stats.rounds for result in results)
    assert engine.stats.time.target_forwards == target.forwards


def test_an_observer_sees_each_round_before_its_tokens_are_emitted() -> None:
    engine = SpeculativeEngine(_target(), _drafter(), rule="dropmatch", dropout=GENTLE)
    rounds: list[Round] = []
    engine.observer = rounds.append
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(max_new_tokens=12))
    emitted = dict.fromkeys(range(len(PROMPTS)), 0)
    while engine.has_work:
        chunks = engine.step()
        seen = rounds[-1]
        assert seen.requests == [chunk.request for chunk in chunks]
        assert seen.num_generated == [emitted[request] for request in seen.requests]
        for b, chunk in enumerate(chunks):
            emitted[chunk.request] += len(chunk.tokens)
            kept = seen.verification.tree.tokens[b, seen.verdict.path[b, 1:]].tolist()
            given = [*kept[: int(seen.verdict.num_accepted[b])], int(seen.verdict.next_token[b])]
            assert list(chunk.tokens) == given[: len(chunk.tokens)]
    assert len(rounds) == engine.stats.time.target_forwards
