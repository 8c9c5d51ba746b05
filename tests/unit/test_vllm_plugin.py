"""The parts of the vLLM plugin that need no vLLM: settings, decisions per request, counts. tests/vllm runs the rest."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import Guard, make_rule
from dropmatch.core.calibrate import choose_p_drop
from dropmatch.core.flat import FlatJudge, FlatRows
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError, StateError, UnknownNameError
from dropmatch.vllm import compat, metrics, register
from dropmatch.vllm.compat import Seam, UnsupportedVLLMError
from dropmatch.vllm.hook import COUNTS, NUM_COUNTS, Asked, Drafts, Hook, Steering
from dropmatch.vllm.settings import RULES, PluginConfig, parse_config, parse_request
from dropmatch.vllm.v1 import draw_by_seed
from scripted import ScriptedModel
from watches import NoWaiting, Peak

V, D, L = 16, 24, 3
MODEL = ScriptedModel(V, D)
LLM = SimpleNamespace(
    compute_logits=lambda hidden: MODEL.head(hidden),
    lm_head=SimpleNamespace(weight=MODEL.head.weight, bias=None),
    logits_processor=SimpleNamespace(soft_cap=None, scale=1.0),
)


# Settings


def test_every_listed_rule_can_be_configured() -> None:
    for rule in RULES:
        made = parse_config({"rule": rule}).settings()
        assert (made.rule is None) == (rule == "lossless")


def test_an_empty_object_means_the_defaults() -> None:
    config = parse_config({})
    assert config == PluginConfig()
    assert (config.rule, config.k, config.p_drop) == ("dropmatch", 5, 0.3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kk": 5}, "Did you mean 'k'"),
        ({"rule": "typical(eps=0.1)"}, "Unknown acceptance rule"),
        ({"rule": 5}, "rule=5"),
        ({"rule": ["js"]}, "rule=['js']"),
        ({"head_chance": "half"}, "head_chance='half'"),
        ({"p_drop": None}, "p_drop"),
        ({"k": True}, "k=True"),
        ({"seed": -1}, "seed=-1"),
        ({"guard": float("nan")}, "guard=nan"),
        ({"point_mass": 1}, "Give true or false"),
        ({"mask_sharing": "often"}, "position"),
        ({"ask": "none"}, "open"),
        ([], "Give a JSON object"),
    ],
)
def test_a_bad_setting_says_what_is_allowed(given: object, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(given)
    assert says in str(refused.value)


def test_a_request_changes_only_what_it_names() -> None:
    config = parse_config({"k": 4, "p_drop": 0.2, "guard": 0.1})
    assert parse_request(config, None) == parse_request(config, {"other": 1}) == config.settings()
    changed = parse_request(config, {"dropmatch_rule": "head", "dropmatch_k": 7.0})
    assert changed.dropout == DropoutConfig(num_paths=7, p_drop=0.2)
    assert changed.rule == Guard(make_rule("head"), min_prob=0.1)
    assert parse_request(config, {"dropmatch_guard": 0}).rule == make_rule("dropmatch")
    assert parse_request(config, {"dropmatch_off": "true"}).rule is None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dropmatch_rule": ["head"]}, ConfigError),
        ({"dropmatch_p_drop": "auto"}, ConfigError),
        ({"dropmatch_p_drop": True}, ConfigError),
        ({"dropmatch_k": 2.5}, ConfigError),
        ({"dropmatch_guard": -0.1}, ConfigError),
        ({"dropmatch_off": 2}, ConfigError),
        ({"dropmatch_seed": 1}, UnknownNameError),
        ({"dropmatch_off": 1, "dropmatch_k": 3}, ConfigError),
    ],
)
def test_a_bad_field_names_itself(fields: dict[str, object], error: type[ConfigError]) -> None:
    with pytest.raises(error, match="|".join(fields)):
        parse_request(PluginConfig(), fields)


def test_registering_in_a_process_without_vllm_does_nothing() -> None:
    register()
    assert "vllm.v1" not in sys.modules


# Versions


def test_versions_are_checked_without_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fits in (
        ("0.28.0", True),
        ("0.33.9+cpu", True),
        ("0.27.2", False),
        ("0.34.0.dev3", False),
        ("dev", False),
    ):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        if fits:
            compat.check_vllm(())
        else:
            with pytest.raises(UnsupportedVLLMError, match=rf">=0.28,<0.34, and this is vllm {version}"):
                compat.check_vllm(())


def test_a_seam_fits_if_its_first_parameters_do() -> None:
    assert Seam("dropmatch.vllm.settings:parse_request", ("config", "extra")).fits()
    assert Seam("dropmatch.vllm.settings:parse_request", ("config",)).fits()
    assert not Seam("dropmatch.vllm.settings:parse_request", ("extra",)).fits()
    assert not Seam("dropmatch.vllm.settings:missing", ()).fits()


# Decisions


def _hook(**settings: object) -> Hook:
    hook = Hook(PluginConfig(**settings), hidden_size=D, dtype=torch.float32, device=torch.device("cpu"))
    assert hook.activate(LLM) == {"has_weight": True, "vocab_size": V}
    return hook


def _drafts(
    hook: Hook, fields: list[dict[str, object]], *, temperature: float = 0.0, distribution: bool = True
) -> Drafts:
    """One step of len(fields) requests, each with L drafted tokens and a bonus row."""
    R = len(fields)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(R * (L + 1), D, generator=generator)
    raw = MODEL.head(hidden)
    draft = raw + torch.randn(raw.shape, generator=generator)
    row = (torch.arange(R)[:, None] * (L + 1) + torch.arange(L)).flatten()
    settings = [hook.read({f"dropmatch_{key}": value for key, value in asked.items()}) for asked in fields]
    return Drafts(
        requests=[Asked(made, seed, temperature) for seed, made in enumerate(settings)],
        num_drafts=[L] * R,
        tokens=draft.argmax(-1)[row].int(),
        positions=torch.arange(10, 10 + L).repeat(R),
        hidden=hidden,
        raw=raw,
        final=raw[row].clone(),
        raw_row=row,
        final_row=torch.arange(R * L),
        draft_logits=(lambda index: draft[row[index]]) if distribution else None,
    )


def _alone(
    drafts: Drafts, rule: str, member: int, *, p_drop: float = 0.1, K: int = 5, position: Tensor | None = None
) -> Tensor:
    """Codes of one request's tokens, judged without the hook."""
    rows = torch.arange(member * L, (member + 1) * L)
    position = drafts.positions[rows] if position is None else position
    keys = torch.stack([torch.full((L,), member), torch.zeros(L, dtype=torch.int64), position], dim=-1)
    draft = drafts.draft_logits
    assert draft is not None
    flat = FlatRows(
        drafts.hidden,
        drafts.raw,
        drafts.final,
        drafts.raw_row[rows],
        drafts.final_row[rows],
        drafts.tokens[rows].long(),
        keys,
        torch.zeros(L),
        lambda index: draft(rows[index]),
    )
    head = MCDropoutHead(MODEL.head, DropoutConfig(p_drop=p_drop, num_paths=K))
    return FlatJudge(make_rule(rule), head, memory_bytes=2**30, ask="all")(flat, is_sampled=False).code


MIXED: list[dict[str, object]] = [
    {"rule": "dropmatch"},
    {"off": True},
    {"rule": "head", "p_drop": 0.3, "k": 3},
    {"rule": "exact+majority"},
    {"rule": "lossless"},
    {"rule": "dropmatch"},
]


@pytest.mark.parametrize("ask", ["all", "open"])
def test_each_request_is_judged_by_its_own_settings(ask: str) -> None:
    hook = _hook(p_drop=0.1, ask=ask)
    drafts = _drafts(hook, MIXED)
    hook.decide(drafts)
    hook.count(torch.ones(len(MIXED) * L, dtype=torch.bool))
    expected = torch.cat(
        [
            _alone(drafts, "dropmatch", 0),
            _alone(drafts, "head", 2, p_drop=0.3, K=3),
            _alone(drafts, "exact+majority", 3),
            _alone(drafts, "dropmatch", 5),
        ]
    )
    counts = hook.counts()
    assert counts[0] == 4 * L
    for reason in (Reason.EXACT, Reason.JS, Reason.MAJORITY, Reason.HEAD):
        assert counts[len(COUNTS) + reason] == int((expected == int(reason)).sum())
    exact = drafts.final.argmax(-1) == drafts.tokens
    judged = torch.cat([torch.arange(m * L, (m + 1) * L) for m in (0, 2, 3, 5)])
    assert counts[2] == int(((expected > 0) & ~exact[judged]).sum())
    assert counts[2] > 0


def test_requests_left_to_vllm_are_not_steered() -> None:
    hook = _hook(p_drop=0.1)
    steering = hook.decide(_drafts(hook, MIXED))
    for member in (1, 4):
        rows = slice(member * L, (member + 1) * L)
        assert bool(steering.logit[rows].isnan().all())
        assert not bool(steering.refuse[rows].any())


def test_only_kept_tokens_count() -> None:
    hook = _hook(p_drop=0.1)
    hook.decide(_drafts(hook, [{}, {}]))
    hook.count(torch.zeros(2 * L, dtype=torch.bool))
    counts = hook.counts()
    assert counts[0] == 2 * L
    assert sum(counts[2:]) == 0


def test_masks_of_a_round_are_keyed_by_its_root() -> None:
    hook = _hook(p_drop=0.1, mask_sharing="round", rule="head")
    drafts = _drafts(hook, [{}])
    hook.decide(drafts)
    hook.count(torch.ones(L, dtype=torch.bool))
    expected = _alone(drafts, "head", 0, position=torch.full((L,), 9))  # the root stands in front of position 10
    assert hook.counts()[len(COUNTS) + Reason.HEAD] == int((expected > 0).sum())


def test_a_missing_distribution_is_counted_and_passes_no_js() -> None:
    hook = _hook(p_drop=0.1)
    hook.decide(_drafts(hook, [{}], distribution=False))
    hook.count(torch.ones(L, dtype=torch.bool))
    assert hook.counts()[COUNTS.index("unknown")] == L
    assert hook.counts()[len(COUNTS) + Reason.JS] == 0


def test_expected_shares_of_sampled_tokens_add_up() -> None:
    hook = _hook(p_drop=0.2, rule="head")
    hook.decide(_drafts(hook, [{}, {}, {}], temperature=0.9))
    hook.count(torch.ones(3 * L, dtype=torch.bool))
    counts = hook.counts()
    assert sum(counts[len(COUNTS) :]) == pytest.approx(3 * L)
    assert counts[len(COUNTS) + Reason.HEAD] == pytest.approx(counts[2])
    assert counts[2] > 0


def test_auto_is_settled_by_the_cores_own_choice_and_judges_nothing_before() -> None:
    hook = _hook(p_drop="auto")
    hook.decide(_drafts(hook, [{}]))
    assert hook.counts()[0] == 0
    hidden = torch.randn(40, D, generator=torch.Generator().manual_seed(5))
    hook.captured = [hidden[:30], hidden[30:]]
    expected = choose_p_drop(MODEL.head, hidden, DropoutConfig(p_drop="auto")).p_drop
    assert hook.settle() == expected == hook.p_drop
    hook.decide(_drafts(hook, [{}]))
    hook.count(torch.ones(L, dtype=torch.bool))
    assert hook.counts()[0] == L


def test_auto_without_hidden_states_is_an_error() -> None:
    with pytest.raises(StateError, match="no hidden states"):
        _hook(p_drop="auto").settle()


def test_steering_is_undone_to_the_last_bit() -> None:
    final = torch.randn(4, V, dtype=torch.bfloat16)
    before = final.clone()
    logit = torch.tensor([torch.nan, 1e30, 2.0, torch.nan])
    tokens = torch.tensor([1, 2, 3, -1])
    restore = Steering(logit, torch.zeros(4, dtype=torch.bool)).apply(final, torch.arange(4), tokens)
    assert int(final[1].argmax()) == 2
    assert float(final[2, 3]) == 2.0
    assert torch.equal(final[[0, 3]], before[[0, 3]])
    restore()
    assert torch.equal(final, before)


def test_half_precision_holds_the_sure_logit() -> None:
    final = torch.zeros(1, V, dtype=torch.float16)
    Steering(torch.tensor([1e30]), torch.zeros(1, dtype=torch.bool)).apply(final, torch.tensor([0]), torch.tensor([5]))
    assert bool(final.isfinite().all())
    assert int(final[0].argmax()) == 5


def test_a_sharded_or_foreign_weight_is_not_taken_for_the_head() -> None:
    foreign = SimpleNamespace(
        compute_logits=LLM.compute_logits,
        lm_head=SimpleNamespace(weight=torch.randn(V, D), bias=None),
        logits_processor=LLM.logits_processor,
    )
    hook = Hook(PluginConfig(), hidden_size=D, dtype=torch.float32, device=torch.device("cpu"))
    assert hook.activate(foreign)["has_weight"] is False
    half = SimpleNamespace(**vars(LLM) | {"lm_head": SimpleNamespace(weight=MODEL.head.weight[: V // 2], bias=None)})
    assert hook.activate(half)["has_weight"] is False


def test_a_rank_without_logits_is_an_error() -> None:
    silent = SimpleNamespace(**vars(LLM) | {"compute_logits": lambda hidden: None})
    hook = Hook(PluginConfig(), hidden_size=D, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="sees no logits"):
        hook.activate(silent)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_step_never_waits_for_the_device(temperature: float) -> None:
    hook = _hook(p_drop=0.1, ask="all")
    drafts = _drafts(hook, MIXED, temperature=temperature)
    with NoWaiting():
        restore = hook.decide(drafts).apply(drafts.final, drafts.final_row, drafts.tokens.long())
        restore()
        request, place = hook.places(drafts.num_drafts)
        hook.count(place < torch.full((len(MIXED),), 2)[request])
    assert hook.counts()[0] == 4 * L


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_profiling_takes_the_memory_of_the_largest_step_and_no_more_than_the_cap(temperature: float) -> None:
    """A vocabulary so large that nothing else counts; two requests' rules, and far more rows than one block holds."""
    d, vocab, cap = 16, 20_000, 8 * 2**20
    model = ScriptedModel(vocab, d)
    llm = SimpleNamespace(
        compute_logits=lambda hidden: model.head(hidden),
        lm_head=SimpleNamespace(weight=model.head.weight, bias=None),
        logits_processor=SimpleNamespace(soft_cap=None, scale=1.0),
    )
    hook = Hook(
        PluginConfig(p_drop=0.1, ask="all", memory_mb=8), hidden_size=d, dtype=torch.float32, device=torch.device("cpu")
    )
    hook.activate(llm)
    with Peak() as profiled:
        hook.dummy_pass(24)
    hidden = torch.randn(24, d, generator=torch.Generator().manual_seed(3))
    raw = model.head(hidden)
    index = torch.arange(24)
    drafts = Drafts(
        requests=[Asked(hook.read(fields), 0, temperature) for fields in ({}, {"dropmatch_rule": "head"})],
        num_drafts=[12, 12],
        tokens=raw.argmax(-1).int(),
        positions=index,
        hidden=hidden,
        raw=raw,
        final=raw.clone(),
        raw_row=index,
        final_row=index,
        draft_logits=lambda i: raw[i],
    )
    with Peak() as used:
        hook.decide(drafts)
    logits_of_all = 24 * hook.config.k * vocab * 4
    assert used.peak < cap < logits_of_all
    assert used.peak <= profiled.peak


def test_places_number_the_tokens_of_each_draft() -> None:
    request, place = _hook().places(np.array([2, 0, 3]))
    assert request.tolist() == [0, 0, 2, 2, 2]
    assert place.tolist() == [0, 1, 0, 1, 2]


def test_drafts_of_requests_with_a_seed_follow_that_seed_and_the_drafters_distribution() -> None:
    n = 4000
    probs, generator = torch.tensor([0.5, 0.3, 0.2, 0.0]).repeat(n, 1), torch.Generator()

    def drawn(unused: np.ndarray | None = None) -> Tensor:
        generator.manual_seed(7)
        tokens = torch.full((n,), 3)
        draw_by_seed(tokens, probs, dict.fromkeys(range(n - 1), generator), unused)
        return tokens

    first = drawn()
    assert int(first[-1]) == 3  # has no seed
    share = first[:-1].bincount(minlength=4) / (n - 1)
    assert share.tolist() == pytest.approx([0.5, 0.3, 0.2, 0.0], abs=0.03)
    assert torch.equal(drawn(), first)
    reading = np.zeros(n, dtype=bool)
    reading[0] = True
    later = drawn(reading)
    assert int(later[0]) == 3
    assert torch.equal(later[1:-1], first[:-2])  # the row that was left out took nothing from the stream


# Counts on their way


def test_counts_ride_on_the_stats_and_leave_them_as_they_were() -> None:
    scheduler, stats = SimpleNamespace(), SimpleNamespace(kv_connector_stats={"other": 1})
    metrics.attach(scheduler, stats)
    assert stats.kv_connector_stats == {"other": 1}  # nothing yet
    metrics.remember(scheduler, SimpleNamespace(dropmatch_counts=[1.0]))
    metrics.remember(scheduler, SimpleNamespace())  # a step without drafts
    metrics.attach(scheduler, stats)
    assert metrics.detach(stats) == [1.0]
    assert stats.kv_connector_stats == {"other": 1}
    alone = SimpleNamespace(kv_connector_stats=None)
    metrics.attach(scheduler, alone)
    metrics.detach(alone)
    assert alone.kv_connector_stats is None
    assert metrics.detach(alone) is None
    assert len(COUNTS) + max(Reason) < NUM_COUNTS
