"""Offline engines on a CPU: V1 with a draft model, V2 under Triton's interpreter, n-grams, tensor parallelism."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import Report

PROMPTS = [
    "the harbour was quiet",
    "the sky is blue because air scatters",
    "def area(width, height): return",
    "a train travels sixty kilometres in",
]
P_DROP = 0.1
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
PENALTIES = {**GREEDY, "frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.3}
COLOURS = {"type": "object", "properties": {"c": {"enum": ["red", "green", "blue"]}}, "required": ["c"]}
JSON = {"temperature": 0.0, "max_tokens": 60, "json": COLOURS}
HOT = [{"temperature": 0.8, "seed": 11 + i, "max_tokens": 24, "ignore_eos": True} for i in range(len(PROMPTS))]
SAMPLES = {"temperature": 0.8, "seed": 5, "n": 3, "max_tokens": 20}
WARM = [GREEDY, HOT[1], GREEDY, HOT[3]]
BANNED = [4, 211, 64]  # the tiny target likes these
MASKED = {**GREEDY, "allowed_token_ids": [t for t in range(3, 320) if t not in BANNED]}


def asking(params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Parameters with fields of the plugin: rule="head" -> dropmatch_rule."""
    return {**params, "extra_args": {f"dropmatch_{name}": value for name, value in fields.items()}}


def each_asking(params: Any, **fields: Any) -> Any:
    """The same of one request's parameters or of several."""
    return [asking(options, **fields) for options in params] if isinstance(params, list) else asking(params, **fields)


def drafting(draft: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(draft), "num_speculative_tokens": 4} | options


def engine(model: Path, draft: Path | None, dropmatch: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    speculative = (
        drafting(draft)
        if draft
        else {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    )
    return {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "disable_log_stats": False,
        "speculative_config": speculative,
        "additional_config": {"dropmatch": dropmatch} if dropmatch else {},
        **options,
    }


def job(name: str, params: Any, prompts: list[str] = PROMPTS) -> dict[str, Any]:
    return {"name": name, "prompts": prompts, "params": params}


def spec(rig: str | None, engine: dict[str, Any], *jobs: dict[str, Any], **options: Any) -> dict[str, Any]:
    # in this process, so that rigs hold for the engine too
    return {
        "rig": rig,
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        "engine": engine,
        "jobs": list(jobs),
    } | options


@pytest.fixture(scope="module")
def stock(run_engine: Callable[..., Report], pair: tuple[Path, Path]) -> Report:
    """vLLM without the plugin's configuration."""
    return run_engine(
        spec(
            "v1-sampling",
            engine(*pair, None),
            job("hot", HOT),
            job("samples", SAMPLES),
            job("greedy", GREEDY),
            job("penalties", PENALTIES),
            job("masked", MASKED),
            job("json", JSON),
            job("logprobs", {**GREEDY, "logprobs": 2}),
            job("stop", {**GREEDY, "stop": ["the", "s"]}),
        )
    )


@pytest.fixture(scope="module")
def naive(run_engine: Callable[..., Report], pair: tuple[Path, Path]) -> Report:
    """A server whose rule reads no distribution drafts as stock vLLM does at any temperature."""
    return run_engine(
        spec(
            "v1-sampling",
            engine(*pair, {"rule": "dropmatch-naive", "p_drop": 0.3}),
            *[
                job(f"{name} {kind}", each_asking(params, **fields))
                for name, params in (("hot", HOT), ("samples", SAMPLES))
                for kind, fields in (("lossless", {"rule": "lossless"}), ("p=0", {"p_drop": 0.0}))
            ],
            job("lossy hot", HOT),
        )
    )


@pytest.fixture(scope="module")
def v1(run_engine: Callable[..., Report], pair: tuple[Path, Path]) -> Report:
    """V1 with a draft model; the cache holds too little for eight long requests at once."""
    lossy = asking(GREEDY, p_drop=P_DROP)
    each = [
        asking(GREEDY, p_drop=P_DROP),
        asking(GREEDY, rule="dropmatch-naive", p_drop=0.3, k=3),
        asking(GREEDY, off=True),
        asking(GREEDY, rule="exact+majority", p_drop=P_DROP, guard=0.2),
    ]
    return run_engine(
        spec(
            "v1-sampling",
            engine(*pair, {"p_drop": "auto"}, block_size=32, num_gpu_blocks_override=24),
            *[
                job(f"{name} {kind}", asking(params, **fields))
                for name, params in (("greedy", GREEDY), ("penalties", PENALTIES), ("masked", MASKED), ("json", JSON))
                for kind, fields in (("lossless", {"rule": "lossless"}), ("p=0", {"p_drop": 0.0}))
            ],
            job("stop p=0", asking({**GREEDY, "stop": ["the", "s"]}, p_drop=0.0)),
            job("logprobs p=0", asking({**GREEDY, "logprobs": 2}, p_drop=0.0)),
            job("lossy", lossy),
            job("lossy again", lossy),
            job("lossy auto", GREEDY),
            job("lossy guarded", asking(GREEDY, p_drop=P_DROP, guard=0.5)),
            job("lossy naive", asking(GREEDY, rule="dropmatch-naive", p_drop=0.3)),
            job("lossy expected", asking(GREEDY, rule="dropmatch-expected", p_drop=P_DROP)),
            job("lossy paper", asking(GREEDY, rule="dropmatch-paper", p_drop=P_DROP)),
            job("lossy logprobs", {**lossy, "logprobs": 2}),
            job("lossy penalties", asking(PENALTIES, p_drop=0.3)),
            job("lossy masked", asking(MASKED, p_drop=0.3)),
            job("lossy json", asking(JSON, p_drop=0.3)),
            job("lossy stop", {**lossy, "stop": ["the", "s"]}),
            job("hot lossless", each_asking(HOT, rule="lossless")),
            job("hot p=0", each_asking(HOT, p_drop=0.0)),
            job("lossy samples", asking(SAMPLES, p_drop=0.3)),
            job("lossy hot", each_asking(HOT, p_drop=0.3)),
            job("lossy hot again", each_asking(HOT, p_drop=0.3)),
            job("lossy other seeds", each_asking([{**options, "seed": 99} for options in HOT], p_drop=0.3)),
            job("lossy warm", each_asking(WARM, p_drop=0.3)),
            job("lossy cold", asking(GREEDY, p_drop=0.3)),
            *[job(f"alone {i}", params, [PROMPTS[i]]) for i, params in enumerate(each)],
            job("mixed", each),
            job("crowd", {**lossy, "max_tokens": 120}, PROMPTS * 2),
            job("few", {**lossy, "max_tokens": 120}, PROMPTS),
            job("long", lossy, [" ".join(PROMPTS)]),
            job("long cached", lossy, [" ".join(PROMPTS)]),
            *[
                job(f"bad {name}", asking(GREEDY, **fields), PROMPTS[:1])
                for name, fields in (
                    ("rule", {"rule": "dropmach"}),
                    ("p_drop", {"p_drop": 1.0}),
                    ("k", {"k": 0}),
                    ("guard", {"guard": "much"}),
                    ("off", {"off": "perhaps"}),
                    ("field", {"p": 0.1}),
                    ("many", {"k": 60_000}),
                )
            ],
            job(
                "bad temperature",
                asking({**GREEDY, "temperature": 1.0}, rule="expected-head", p_drop=P_DROP),
                PROMPTS[:1],
            ),
            profile=True,
        )
    )


@pytest.fixture(scope="module")
def v2(run_engine: Callable[..., Report], pair: tuple[Path, Path]) -> Report:
    """Model Runner V2 under Triton's interpreter: slow, so two prompts each."""
    two = PROMPTS[:2]
    hot = {"temperature": 0.8, "seed": 11, "max_tokens": 16, "ignore_eos": True}
    return run_engine(
        spec(
            "v2",
            engine(*pair, {"p_drop": P_DROP}),
            job("lossy", GREEDY, two),
            job("greedy p=0", asking(GREEDY, p_drop=0.0), two),
            job("penalties p=0", asking({**PENALTIES, "max_tokens": 24}, p_drop=0.0), two),
            job("json", asking(JSON, p_drop=0.3), two),
            job("hot lossless", asking(hot, rule="lossless"), two),
            job("hot p=0", asking(hot, p_drop=0.0), two),
            job("hot", asking({**hot, "max_tokens": 24}, p_drop=0.3), two),
            job("hot again", asking({**hot, "max_tokens": 24}, p_drop=0.3), two),
            job("mixed", [asking(GREEDY, p_drop=P_DROP), asking(GREEDY, off=True)], two),
            profile=True,
        )
    )


@pytest.mark.parametrize("name", ["greedy", "penalties", "masked", "json"])
@pytest.mark.parametrize("kind", ["lossless", "p=0"])
def test_without_dropout_the_tokens_are_those_of_stock_vllm(stock: Report, v1: Report, name: str, kind: str) -> None:
    assert v1.tokens(f"{name} {kind}") == stock.tokens(name)


def test_without_dropout_stop_strings_and_logprobs_are_those_of_stock_vllm(stock: Report, v1: Report) -> None:
    assert v1.jobs["stop p=0"]["outputs"] == stock.jobs["stop"]["outputs"]
    mine, theirs = v1.jobs["logprobs p=0"]["outputs"], stock.jobs["logprobs"]["outputs"]
    assert [m[0]["tokens"] for m in mine] == [t[0]["tokens"] for t in theirs]
    for m, t in zip(mine, theirs, strict=True):
        for a, b in zip(m[0]["logprobs"], t[0]["logprobs"], strict=True):
            assert a == pytest.approx(b, abs=1e-4)  # float32 sums in batches of other shapes


def test_the_rule_keeps_more_than_stock_and_counts_what_is_lossy(stock: Report, v1: Report) -> None:
    assert v1.metric("lossy", "dropmatch_lossy_tokens") > 0
    assert v1.tokens("lossy") != stock.tokens("greedy")
    accepted, drafts = (v1.metric("lossy", f"spec_decode_num_{name}") for name in ("accepted_tokens", "drafts"))
    assert accepted / drafts > stock.metric("greedy", "spec_decode_num_accepted_tokens") / stock.metric(
        "greedy", "spec_decode_num_drafts"
    )


def test_counts_of_reasons_add_up_to_the_accepted_tokens(v1: Report) -> None:
    metrics = v1.jobs["lossy"]["metrics"]
    kept = {name: value for name, value in metrics.items() if name.startswith("dropmatch_kept_tokens/")}
    assert sum(kept.values()) == v1.metric("lossy", "spec_decode_num_accepted_tokens")
    assert {name.partition("/")[2] for name, value in kept.items() if value} <= {"exact", "js", "majority"}
    assert v1.metric("lossy", "dropmatch_drafted_tokens") == v1.metric("lossy", "spec_decode_num_draft_tokens")
    assert 0 < v1.metric("lossy", "dropmatch_asked_tokens") < v1.metric("lossy", "dropmatch_drafted_tokens")


def test_a_request_left_to_vllm_is_not_counted(v1: Report) -> None:
    assert v1.metric("greedy lossless", "dropmatch_drafted_tokens") == 0
    assert v1.metric("greedy lossless", "spec_decode_num_draft_tokens") > 0


def test_equal_requests_get_equal_tokens(v1: Report) -> None:
    assert v1.tokens("lossy again") == v1.tokens("lossy")


def test_auto_measures_p_drop_on_the_model(v1: Report) -> None:
    assert v1.status is not None
    assert 0.0 < v1.status[0]["p_drop"] < 0.3  # a head of 64 inputs scatters far more than a large model's
    assert v1.metric("lossy auto", "dropmatch_drafted_tokens") > 0


def test_a_guard_keeps_fewer_lossy_tokens(v1: Report) -> None:
    assert v1.metric("lossy guarded", "dropmatch_lossy_tokens") < v1.metric("lossy", "dropmatch_lossy_tokens")


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("naive", {"head"}),
        ("paper", {"js", "majority"}),
        ("expected", {"exact", "expected_js", "expected_majority"}),
    ],
)
def test_presets_decide_by_their_own_rules(v1: Report, name: str, reasons: set[str]) -> None:
    kept = {
        key.partition("/")[2]
        for key, value in v1.jobs[f"lossy {name}"]["metrics"].items()
        if key.startswith("dropmatch_kept") and value
    }
    assert kept
    assert kept <= reasons


def test_closed_form_rules_ask_no_heads(v1: Report) -> None:
    assert v1.metric("lossy expected", "dropmatch_asked_tokens") == 0
    assert v1.metric("lossy expected", "dropmatch_lossy_tokens") > 0


def test_logprobs_are_the_targets_own_also_where_a_lossy_token_was_kept(v1: Report) -> None:
    """The steering logit must not be what is reported: a kept token that is not the best has a lower one."""
    assert v1.tokens("lossy logprobs") == v1.tokens("lossy")
    below = 0
    for output in v1.jobs["lossy logprobs"]["outputs"]:
        for token, entries in zip(output[0]["tokens"], output[0]["logprobs"], strict=True):
            assert all(value <= 0.0 for value in entries.values())
            below += entries[str(token)] < max(entries.values())
    # the counters also count what a last round kept beyond max_tokens
    assert 0 < below <= v1.metric("lossy logprobs", "dropmatch_lossy_tokens")


def test_masks_hold_for_lossy_tokens(v1: Report) -> None:
    assert not {token for tokens in v1.tokens("lossy masked") for token in tokens} & set(BANNED)
    assert {token for tokens in v1.tokens("lossy") for token in tokens} & set(BANNED)


def test_penalties_reach_lossy_decoding(v1: Report) -> None:
    def repeats(job: str) -> int:
        return sum(len(tokens) - len(set(tokens)) for tokens in v1.tokens(job))

    assert repeats("lossy penalties") < repeats("lossy")


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_structured_output_stays_valid(name: str, request: pytest.FixtureRequest) -> None:
    report: Report = request.getfixturevalue(name)
    for output in report.jobs["lossy json" if name == "v1" else "json"]["outputs"]:
        assert json.loads(output[0]["text"])["c"] in {"red", "green", "blue"}


def test_stop_strings_end_lossy_texts(v1: Report) -> None:
    for output in v1.jobs["lossy stop"]["outputs"]:
        assert "the" not in output[0]["text"]


@pytest.mark.parametrize("name", ["hot", "samples"])
@pytest.mark.parametrize("kind", ["lossless", "p=0"])
def test_without_dropout_the_samples_are_those_of_stock_vllm(
    stock: Report, naive: Report, name: str, kind: str
) -> None:
    """By each request's seed, all n of a request."""
    assert naive.jobs[f"{name} {kind}"]["outputs"] == stock.jobs[name]["outputs"]
    assert naive.metric("lossy hot", "dropmatch_lossy_tokens") > 0


def test_samples_of_one_request_differ(v1: Report) -> None:
    for output in v1.jobs["lossy samples"]["outputs"]:
        assert len({tuple(sample["tokens"]) for sample in output}) == len(output) == SAMPLES["n"]


def test_seeds_of_requests_repeat_lossy_samples(v1: Report) -> None:
    assert v1.metric("lossy hot", "dropmatch_lossy_tokens") > 0
    assert v1.tokens("hot p=0") == v1.tokens("hot lossless")
    assert v1.tokens("lossy hot again") == v1.tokens("lossy hot") != v1.tokens("hot p=0")
    assert not {*map(tuple, v1.tokens("lossy other seeds"))} & {*map(tuple, v1.tokens("lossy hot"))}


def test_greedy_and_sampled_requests_share_a_batch(v1: Report) -> None:
    """The drafter hands greedy rows another distribution than sampled ones; neither takes the other's."""
    cold, hot = v1.tokens("lossy cold"), v1.tokens("lossy hot")
    assert v1.tokens("lossy warm") == [cold[0], hot[1], cold[2], hot[3]]


def test_requests_with_different_rules_do_not_leak_into_each_other(v1: Report) -> None:
    alone = [v1.tokens(f"alone {i}")[0] for i in range(len(PROMPTS))]
    assert v1.tokens("mixed") == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_preemption_changes_no_token(v1: Report) -> None:
    """Eight requests share a cache that holds fewer, so that some are thrown out and computed anew."""
    assert v1.metric("crowd", "num_preemptions") > 0
    assert v1.tokens("crowd") == v1.tokens("few") * 2
    assert [tokens[:40] for tokens in v1.tokens("few")] == v1.tokens("lossy")


def test_a_cached_prompt_gets_the_tokens_of_a_computed_one(v1: Report) -> None:
    assert v1.metric("long cached", "prefix_cache_hits") > v1.metric("long", "prefix_cache_hits")
    assert v1.tokens("long cached") == v1.tokens("long")
    assert v1.metric("long", "dropmatch_lossy_tokens") > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rule", "Unknown acceptance rule 'dropmach'. Did you mean 'dropmatch'"),
        ("p_drop", "dropmatch_p_drop=1.0"),
        ("k", "dropmatch_k=0"),
        ("guard", "dropmatch_guard='much'"),
        ("off", "dropmatch_off='perhaps'"),
        ("field", "Unknown field of vllm_xargs 'dropmatch_p'"),
        ("many", "dropmatch_k=60000: Rule 'dropmatch' with k=60000 takes"),
        ("temperature", "temperature=1.0"),
    ],
)
def test_a_bad_field_is_refused_by_name(v1: Report, name: str, says: str) -> None:
    error = v1.jobs[f"bad {name}"]["error"]
    assert error.startswith("VLLMValidationError")
    assert says in error


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_memory_profiling_runs_the_heads(name: str, request: pytest.FixtureRequest) -> None:
    report: Report = request.getfixturevalue(name)
    assert report.status is not None
    assert report.status[0]["dummy_passes"] >= 1


def test_both_runners_decide_alike(v1: Report, v2: Report) -> None:
    assert v2.status is not None
    assert v1.status is not None
    assert v2.status[0]["runner"] != v1.status[0]["runner"]
    assert v2.tokens("lossy") == v1.tokens("lossy")[:2]
    assert v2.metric("lossy", "dropmatch_lossy_tokens") > 0


def test_the_tokens_are_those_of_the_transformers_engine(v1: Report, pair: tuple[Path, Path]) -> None:
    """Same rule, masks and heads, so the same lossy text: two engines that share no forward."""
    import dropmatch
    import tiny

    decoder = dropmatch.load(*map(str, pair), rule="dropmatch", p_drop=P_DROP, dtype="float32")
    tokenizer = tiny.tokenizer()
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    params = dropmatch.SamplingParams(max_new_tokens=GREEDY["max_tokens"], eos_ids=(), draft_length=4, seed=0)
    assert [list(generation.tokens) for generation in decoder.run(ids, params).generations] == v1.tokens("lossy")


def test_v2_without_dropout_gives_stock_tokens(stock: Report, v2: Report) -> None:
    assert v2.tokens("greedy p=0") == stock.tokens("greedy")[:2]
    assert v2.tokens("penalties p=0") == [tokens[:24] for tokens in stock.tokens("penalties")[:2]]


def test_v2_without_dropout_samples_what_stock_samples(v2: Report) -> None:
    assert v2.tokens("hot p=0") == v2.tokens("hot lossless")


def test_v2_seeds_repeat_lossy_samples(v2: Report) -> None:
    assert v2.tokens("hot") == v2.tokens("hot again")
    assert v2.metric("hot", "dropmatch_lossy_tokens") > 0


def test_v2_mixed_rules_do_not_leak(stock: Report, v2: Report) -> None:
    assert v2.tokens("mixed") == [v2.tokens("lossy")[0], stock.tokens("greedy")[1]]


def test_two_ranks_decide_alike(run_engine: Callable[..., Report], pair: tuple[Path, Path], v1: Report) -> None:
    report = run_engine(
        spec(
            None,
            engine(*pair, {"p_drop": P_DROP}, tensor_parallel_size=2, distributed_executor_backend="mp"),
            job("lossy", GREEDY),
        )
    )
    assert report.status is not None
    first, second = report.status
    assert first["counts"] == second["counts"]
    assert sum(first["counts"]) > 0
    assert report.tokens("lossy") == v1.tokens("lossy")
    assert report.metric("lossy", "dropmatch_lossy_tokens") == v1.metric("lossy", "dropmatch_lossy_tokens")


@pytest.mark.parametrize(
    ("method", "rig"), [("eagle3", None), ("eagle3", "v2"), ("eagle", None), ("mtp", None), ("mtp", "v2")]
)
def test_other_drafters_hand_their_distribution_over(
    run_engine: Callable[..., Report], tmp_path: Path, method: str, rig: str | None
) -> None:
    """Random weights: their drafts are rarely exact, so what is kept is kept by the rule. Asks the heads about all
    drafted tokens, as on a GPU, where no step may wait for the device."""
    import models

    save = {"eagle3": models.save_eagle3, "eagle": models.save_eagle, "mtp": models.save_mtp}[method]
    target, head = save(tmp_path)
    short = {**GREEDY, "max_tokens": 24}
    report = run_engine(
        spec(
            rig,
            engine(
                target,
                None,
                {"rule": "dropmatch", "k": 20, "p_drop": 0.9, "ask": "all"},
                speculative_config={"method": method, "model": str(head), "num_speculative_tokens": 3},
            ),
            job("lossless", asking(short, rule="lossless"), PROMPTS[:2]),
            job("p=0", asking(short, p_drop=0.0), PROMPTS[:2]),
            job("lossy", short, PROMPTS[:2]),
            watch=True,
        )
    )
    assert report.tokens("p=0") == report.tokens("lossless")
    assert report.metric("lossy", "dropmatch_kept_tokens/js") > 0
    assert report.metric("lossy", "dropmatch_unknown_distribution_tokens") == 0
    assert report.metric("lossy", "dropmatch_asked_tokens") == report.metric("lossy", "dropmatch_drafted_tokens") > 0


TEXTS = [
    "The cat sat on the mat. The cat sat on the mat. The dog",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "One, two, three, four. One, two, three, five. One, two,",
]
LONGER = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
LONGER_HOT = [{**LONGER, "temperature": 0.8, "seed": i} for i in range(len(TEXTS))]


def test_ngrams_with_smollm2(run_engine: Callable[..., Report], smollm2: Path) -> None:
    """A real model: p_drop=0 and lossless give stock tokens, at temperature > 0 by seed too; dropout keeps more."""
    stock = run_engine(
        spec("v1-sampling", engine(smollm2, None, None), job("greedy", LONGER, TEXTS), job("hot", LONGER_HOT, TEXTS))
    )
    mine = run_engine(
        spec(
            "v1-sampling",
            engine(smollm2, None, {"rule": "dropmatch-naive", "include_plain_argmax": True, "p_drop": 0.05}),
            job("greedy", asking(LONGER, p_drop=0.0), TEXTS),
            job("hot", each_asking(LONGER_HOT, p_drop=0.0), TEXTS),
            job("hot lossless", each_asking(LONGER_HOT, rule="lossless"), TEXTS),
            job("lossy", LONGER, TEXTS),
            job("bad", asking(LONGER, rule="dropmatch"), TEXTS[:1]),
        )
    )
    assert mine.tokens("greedy") == stock.tokens("greedy")
    assert mine.tokens("hot") == mine.tokens("hot lossless") == stock.tokens("hot")
    assert mine.metric("lossy", "dropmatch_kept_tokens/head") == mine.metric("lossy", "dropmatch_lossy_tokens") > 0
    assert "method 'ngram' gives none" in mine.jobs["bad"]["error"]


@pytest.mark.model
def test_the_default_pair_keeps_more_and_stays_stock_without_dropout(run_engine: Callable[..., Report]) -> None:
    """Qwen2.5-Coder 1.5B with the 0.5B as draft model, in float32 so that rounding decides nothing: about 10 GB."""
    from dropmatch.provenance import cache_dir

    target, draft = (cache_dir() / "models" / f"qwen2.5-coder-{size}" for size in ("1.5b", "0.5b"))
    if not (target / "model.safetensors").exists() or not (draft / "model.safetensors").exists():
        pytest.skip(f"needs the default pair in {target.parent} (dropmatch fetch default)")
    options = {"max_model_len": 512, "max_num_seqs": 3}
    stock = run_engine(spec(None, engine(target, draft, None, **options), job("greedy", LONGER, TEXTS)))
    mine = run_engine(
        spec(
            None,
            engine(target, draft, {"rule": "dropmatch"}, **options),
            job("p=0", asking(LONGER, p_drop=0.0), TEXTS),
            job("lossless", asking(LONGER, rule="lossless"), TEXTS),
            job("lossy", LONGER, TEXTS),
            job("expected", asking(LONGER, rule="dropmatch-expected"), TEXTS),
        )
    )
    assert mine.tokens("p=0") == mine.tokens("lossless") == stock.tokens("greedy")
    for name in ("lossy", "expected"):
        assert mine.metric(name, "dropmatch_lossy_tokens") > 0
        assert _tau(mine, name) > _tau(stock, "greedy")


def _tau(report: Report, name: str) -> float:
    accepted, drafts = (report.metric(name, f"spec_decode_num_{part}") for part in ("accepted_tokens", "drafts"))
    return 1.0 + accepted / drafts
