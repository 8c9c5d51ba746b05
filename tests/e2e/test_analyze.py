"""`dropmatch analyze` and `dropmatch bench batch` on a tiny pair: figures against their definitions, stops, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

import dropmatch
import tiny
from commands import Command, Done
from dropmatch.api import Decoder
from dropmatch.bench import batch
from dropmatch.bench.analyses import heads as heads_analysis
from dropmatch.bench.analyses import overhead as overhead_analysis
from dropmatch.bench.analyses.single_head import Head, HeadAlone, head_tokens
from dropmatch.bench.journal import Journal
from dropmatch.bench.tables import table
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.calibrate import P_DROP_GRID, TARGET_RADIUS
from dropmatch.core.head import MCDropoutHead
from dropmatch.errors import ConfigError
from dropmatch.hf.encoders import load_encoder, load_entailment
from dropmatch.ops.divergence import LN2
from tabled import Table, column, tables

QUESTIONS = ("how fast is the train", "why is the sky blue", "how many men carried the nets", "what is the area")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def decoder(pair: tiny.TinyPair) -> Decoder:
    return dropmatch.load(str(pair.target), str(pair.draft), p_drop=0.1, num_paths=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    lines = [
        {"id": f"gsm8k/{i}", "task": "gsm8k", "prompt": text, "answer": "7", "meta": {}}
        for i, text in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _read(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def _tables(path: Path) -> list[Table]:
    """As documents show a results file."""
    return tables(table([(path, path.name)]))


# -- one head alone -------------------------------------------------------------------------------------------------


def _slow_head(decoder: Decoder, prompt: list[int], head: Head, count: int, *, stream: int) -> list[int]:
    """What one head decodes, the whole text run anew for every token and all heads asked."""
    sampler = MCDropoutHead(decoder.target.head, DropoutConfig(num_paths=3, p_drop=head.p_drop))
    ids = list(prompt)
    for _ in range(count):
        hidden = decoder.target.model.model(torch.tensor([ids])).last_hidden_state[0, -1:]
        logits = sampler.keyed_logits(hidden, torch.tensor([[0, stream, len(ids)]]))
        ids.append(int(logits[0, head.path].argmax()))
    return ids[len(prompt) :]


def test_a_head_alone_decodes_as_if_it_were_the_model(decoder: Decoder) -> None:
    """Several heads, rates and the target itself share a batch; each gives the text of the slow way."""
    rule = HeadAlone()
    engine = decoder.engine(rule="exact", config=EngineConfig(draft_length=4, max_batch=8))
    prompt = decoder.encode(QUESTIONS[0])
    heads = [Head(path, rate) for rate in (0.0, 0.3, 0.5) for path in (0, 2)]
    requests: dict[int, Head | None] = {}
    for stream, head in enumerate([None, *heads]):
        params = SamplingParams(
            max_new_tokens=12, eos_ids=(), seed=0, stream=stream, rule=None if head is None else rule
        )
        request = engine.add(prompt, params)
        requests[request] = head
        if head is not None:
            rule.heads[request] = head
    tokens: dict[int, list[int]] = {}
    for chunk in engine.run():
        tokens.setdefault(chunk.request, []).extend(chunk.tokens)
    plain = tokens[0]
    for stream, (request, head) in enumerate(requests.items()):
        if head is not None:
            assert tokens[request] == _slow_head(decoder, prompt, head, 12, stream=stream)
            assert (tokens[request] == plain) or head.p_drop > 0
    assert any(tokens[request] != plain for request in tokens)


def test_single_heads_have_the_masks_of_the_ensemble(decoder: Decoder) -> None:
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    keys = torch.stack([torch.zeros(200), torch.full((200,), 3.0), torch.arange(200.0)], dim=-1).long()
    sampler = MCDropoutHead(decoder.target.head, DropoutConfig(num_paths=5, p_drop=0.3))
    together = sampler(hidden, keys, pick=lambda logits, _: logits.argmax(-1)).tokens
    for path in (0, 4):
        alone = head_tokens(decoder.target.head, hidden, keys, [Head(path, 0.3)] * 200)
        assert torch.equal(alone, together[:, path])


def test_a_head_alone_refuses_to_sample(decoder: Decoder) -> None:
    rule = HeadAlone()
    engine = decoder.engine()
    rule.heads[engine.add([5, 6], SamplingParams(temperature=1.0, rule=rule))] = Head(0, 0.1)
    with pytest.raises(ConfigError, match="decodes greedily"):
        engine.step()


# -- analyze heads --------------------------------------------------------------------------------------------------


@pytest.fixture
def analyze_heads(command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path) -> Command:
    def run(*arguments: str | Path) -> Done:
        models = ("--target", pair.target, "--draft", pair.draft)
        small = ("--rates", "0,0.5", "--k", "3", "--p-drop", "0.1", "-n", "12", "-L", "3", "--batch", "5")
        return command(
            "analyze", "heads", "--data", data, *models, *small, "--output", tmp_path / "heads.json", *arguments
        )

    return run


def test_heads_reports_all_three_tables(analyze_heads: Command, tmp_path: Path) -> None:
    done = analyze_heads()
    assert done.code == 0, done.err
    result = _read(tmp_path / "heads.json")
    rows = {row["arm"]: row for row in result["accuracy"]}
    assert list(rows) == ["target", "draft", *(f"head {i} p={p}" for p in ("0", "0.5") for i in (1, 2, 3))]
    for row in rows.values():
        assert row["n"] == 4
        assert 0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 1
    assert all(rows[f"head {i} p=0"]["same_text_as_target"] == 1.0 for i in (1, 2, 3))  # no dropout: the target itself
    assert rows["head 1 p=0.5"]["same_text_as_target"] < 1.0
    lengths = sum(round(row["length_mean"] * row["n"]) for row in [rows["target"]])
    assert sum(row["positions"] for row in result["votes"]) == lengths
    assert sum(row["share"] or 0 for row in result["votes"]) == pytest.approx(1.0)
    assert [row["kept_by"] for row in result["divergence"]] == ["js", "majority", "rejected"]
    by_kind = {row["kept_by"]: row for row in result["divergence"]}
    assert by_kind["js"]["js_draft_mean"] <= by_kind["js"]["radius_mean"] <= LN2  # what Eq. 6 asks for
    assert sum(row["tokens"] for row in result["divergence"]) > 0
    assert result["provenance"]["torch"] == torch.__version__
    assert result["settings"]["items"] == [f"gsm8k/{i}" for i in range(4)]
    for title in ("Each head alone", "Votes of 3 heads", "Eq. 6"):
        assert title in done.out
    assert "answers: " in done.err  # progress also where standard error is no terminal
    alone, votes, divergence = _tables(tmp_path / "heads.json")
    assert column(alone, "head 3")[2].startswith(f"{100 * rows['head 3 p=0']['accuracy']:.1f} (")
    assert column(votes, "positions") == [str(row["positions"]) for row in result["votes"]]
    assert column(divergence, "tokens") == [str(row["tokens"]) for row in result["divergence"]]
    assert not list(tmp_path.glob("*.journal"))


def test_votes_count_what_the_heads_say_at_each_position(decoder: Decoder) -> None:
    prompt, tokens = decoder.encode(QUESTIONS[1]), [40, 41, 42, 43]
    sampler = MCDropoutHead(decoder.target.head, DropoutConfig(num_paths=3, p_drop=0.4))
    model = decoder.engine().target
    sizes = heads_analysis.votes_at(model, sampler, prompt, tokens, 0, 6)
    hidden = decoder.target.model.model(torch.tensor([[*prompt, *tokens]])).last_hidden_state[0]
    expected = [[0, 0.0, 0.0, 0] for _ in range(3)]
    for i in range(len(tokens)):
        at = len(prompt) + i
        logits = sampler.keyed_logits(hidden[at - 1 : at], torch.tensor([[0, 6, at]]))[0]  # [K, V]
        votes = logits.argmax(-1).tolist()
        size = max(votes.count(token) for token in votes)
        centroid, plain = logits.mean(0), decoder.target.head(hidden[at - 1])
        winner = max((t for t in votes if votes.count(t) == size), key=lambda t: float(centroid[t]))
        entry = expected[size - 1]
        entry[0] += 1
        entry[1] += float(centroid.softmax(-1)[winner])
        entry[2] += float(plain.softmax(-1)[winner])
        entry[3] += int(plain.argmax()) == winner
    for got, wanted in zip(sizes, expected, strict=True):
        assert list(got.values()) == pytest.approx(wanted, abs=1e-4)
    assert model.lengths == []


def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not_stopped(
    analyze_heads: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze_heads()
    whole = _read(tmp_path / "heads.json")
    (tmp_path / "heads.json").unlink()
    add, count = Journal.add, 0

    def stop_at(journal: Journal, entry: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count in (9, 40):  # while answers are decoded, and in a later part
            raise KeyboardInterrupt
        add(journal, entry)

    monkeypatch.setattr(Journal, "add", stop_at)
    done = analyze_heads()
    assert done.code == 130
    assert "Give the same command again" in done.err
    assert not (tmp_path / "heads.json").exists()
    assert len((tmp_path / "heads.json.journal").read_text().splitlines()) == 9  # the settings and eight answers
    assert analyze_heads().code == 130
    other = analyze_heads("--seed", "1")
    assert (other.code, "other settings" in other.err) == (2, True)
    text = data.read_text(encoding="utf-8")
    data.write_text(text.replace("train", "boat"), encoding="utf-8")
    other = analyze_heads()  # other prompts under the same ids
    data.write_text(text, encoding="utf-8")
    assert (other.code, "prompts: " in other.err) == (2, True)
    assert analyze_heads().code == 0
    resumed = _read(tmp_path / "heads.json")
    for part in ("accuracy", "answers"):
        assert resumed[part] == whole[part]
    for part in ("votes", "divergence"):  # other batches round the last digits of float32 otherwise
        for now, before in zip(resumed[part], whole[part], strict=True):
            assert now.keys() == before.keys()
            for key, value in before.items():
                assert now[key] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value)


def test_parts_can_be_asked_for_alone(analyze_heads: Command, tmp_path: Path) -> None:
    assert analyze_heads("--parts", "votes").code == 0
    result = _read(tmp_path / "heads.json")
    assert "votes" in result
    assert not {"accuracy", "divergence"} & result.keys()
    done = analyze_heads("--parts", "vote")
    assert (done.code, "Did you mean 'votes'" in done.err) == (2, True)


def test_prompts_without_ground_truth_are_refused_before_decoding(
    analyze_heads: Command, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "open.jsonl"
    path.write_text('{"id": "a", "task": "prompts", "prompt": "write a poem", "meta": {}}\n', encoding="utf-8")
    done = analyze_heads("--data", path)
    assert (done.code, "a has no ground truth" in done.err) == (2, True)
    assert "answers: " not in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rates", "0.1,x"), "--rates='0.1,x' is not allowed"),
        (("--rates", "1.0"), "numbers in [0, 1)"),
        (("--num", "9"), "has 4 items, and 9 were asked for"),
        (("--output", "/dev/null/x.json"), "cannot be written"),
    ],
)
def test_bad_options_are_refused_before_models_load(
    analyze_heads: Command, arguments: tuple[str, ...], message: str
) -> None:
    done = analyze_heads(*arguments, "--target", "no-such-model")
    assert done.code == 2
    assert message in done.err


# -- analyze overhead -----------------------------------------------------------------------------------------------


def test_overhead_times_every_way_to_judge(command: Command, pair: tiny.TinyPair, tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    done = command(
        *("analyze", "overhead", "--target", pair.target, "--inputs", "4", "--context", "30", "--repeats", "3"),
        *("--shortlist-size", "50", "--output", output),
    )
    assert done.code == 0, done.err
    result = _read(output)
    assert [row["part"] for row in result["rows"]] == [
        "body",
        "plain head",
        *(name for name, _, _ in overhead_analysis._WAYS),
    ]
    forward = sum(row["share_of_forward"] for row in result["rows"][:2])
    assert 0.5 < forward < 2.0  # two medians against the median of their sum
    assert all(row["ms_q10"] <= row["ms_median"] <= row["ms_q90"] for row in result["rows"])
    assert [row["added_ms"] is None for row in result["rows"][:3]] == [True, True, False]
    assert result["rows"][2]["added_ms"] == 0.0
    assert all(len(values) == 3 for values in result["seconds"].values())
    assert result["settings"]["skipped"] == []
    assert "all 4 positions judged" in done.out
    (shown,) = _tables(output)
    assert column(shown, "ms")[1:] == [f"{row['ms_median']:.3f}" for row in result["rows"]]


def test_overhead_judges_all_inputs_as_the_engine_would(decoder: Decoder) -> None:
    """The measured rule call says of every successor what one head's or the plain argmax says of it."""
    bench = overhead_analysis._prepare(decoder, 5, 20, "the harbour was quiet when the last boat came in")
    hidden = bench.model.forward(bench.tokens).hidden
    logits = bench.model.head(hidden)
    rule = dropmatch.make_rule("lossless")
    head = MCDropoutHead(bench.model.head, decoder.dropout)
    kept = overhead_analysis._way(bench, hidden, logits, head, rule)()[0, 1:] > 0
    full = decoder.target.model(torch.tensor([bench.ids])).logits[0]
    successors = torch.tensor(bench.ids[-5:])
    assert torch.equal(kept, full[-6:-1].argmax(-1) == successors)


def test_overhead_leaves_out_what_a_head_does_not_allow(command: Command, pair: tiny.TinyPair, tmp_path: Path) -> None:
    done = command(
        *("analyze", "overhead", "--target", pair.target, "--context", "5", "--repeats", "3"),
        *("--output", tmp_path / "o.json"),
    )
    result = _read(tmp_path / "o.json")
    assert len(result["settings"]["skipped"]) == 2  # a shortlist of 1,024 of 320 tokens is none
    assert "Left out: shortlist" in done.out


def test_overhead_names_the_room_that_a_context_needs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "config", EngineConfig(max_length=64))
    with pytest.raises(ConfigError, match="need 66 positions; the models have 64"):
        overhead_analysis._prepare(decoder, 5, 60, "the harbour was quiet")
    with pytest.raises(ConfigError, match="The text is empty"):
        overhead_analysis._prepare(decoder, 5, 20, "")


# -- analyze radius -------------------------------------------------------------------------------------------------


def test_radius_grows_with_the_rate_and_says_what_auto_picks(
    command: Command, pair: tiny.TinyPair, tmp_path: Path
) -> None:
    done = command("analyze", "radius", "--target", pair.target, "--output", tmp_path / "r.json", "--positions", "61")
    assert done.code == 0, done.err
    result = _read(tmp_path / "r.json")
    assert [row["p_drop"] for row in result["radius"]] == list(P_DROP_GRID)
    medians = [row["sampled"]["q50"] for row in result["radius"]]
    assert medians == sorted(medians, reverse=True)  # 61 is odd: the median is then no matter of convention
    assert [row["expected"]["q50"] for row in result["radius"]] == sorted(
        (row["expected"]["q50"] for row in result["radius"]), reverse=True
    )
    by_rate = {row["p_drop"]: row for row in result["radius"]}
    for kind in ("sampled", "expected"):
        choice = result["auto"][kind]
        assert by_rate[choice["p_drop"]][kind]["q50"] == pytest.approx(choice["median_radius"][str(choice["p_drop"])])
        assert choice["median_radius"][str(choice["p_drop"])] <= TARGET_RADIUS
        assert f"picks {choice['p_drop']:g}" in done.out
    assert result["settings"]["positions"] == 61
    (shown,) = _tables(tmp_path / "r.json")
    assert column(shown, "median") == [f"{median:.4f}" for median in medians]


def test_radius_can_be_asked_at_prompts(command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path) -> None:
    arguments = ("--target", pair.target, "--output", tmp_path / "r.json", "--rates", "0,0.3", "--num", "2")
    done = command("analyze", "radius", "--data", data, *arguments)
    assert done.code == 0, done.err
    result = _read(tmp_path / "r.json")
    assert result["settings"]["items"] == ["gsm8k/0", "gsm8k/1"]
    assert [row["p_drop"] for row in result["radius"]] == [0.3, 0.0]
    assert result["radius"][1]["sampled"]["q90"] == 0.0
    assert result["radius"][1]["expected_over_sampled"] is None  # 0 over 0 says nothing
    assert 0.0 < result["radius"][0]["sampled"]["q10"] <= result["radius"][0]["sampled"]["q90"] <= LN2


# -- analyze similarity ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny random encoder and a tiny random classifier over the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "initializer_range": 0.5,
    }
    torch.manual_seed(0)
    labels = ("contradiction", "neutral", "ENTAILMENT")
    encoder = BertModel(BertConfig(**settings))
    nli = BertForSequenceClassification(BertConfig(**settings, id2label=dict(enumerate(labels))))
    nameless = BertForSequenceClassification(BertConfig(**settings, num_labels=3))
    models = {"encoder": encoder, "nli": nli, "nameless": nameless}
    return {name: tiny.save(folder / name, model) for name, model in models.items()}


def test_similarity_writes_symmetric_matrices(
    command: Command, pair: tiny.TinyPair, data: Path, bert: dict[str, str], tmp_path: Path
) -> None:
    done = command(
        *("analyze", "similarity", "--data", data, "--target", pair.target, "--draft", pair.draft, "--num", "3"),
        *("--encoder", bert["encoder"], "--entailment", bert["nli"], "--k", "3", "--rates", "0,0.4", "-n", "10"),
        *("--output", tmp_path / "s.json"),
    )
    assert done.code == 0, done.err
    result = _read(tmp_path / "s.json")
    for row in result["similarity"]:
        cosine, entailment = torch.tensor(row["cosine"]), torch.tensor(row["entailment"])
        assert cosine.shape == entailment.shape == (3, 3)
        assert torch.allclose(cosine, cosine.T, atol=1e-6)
        assert torch.equal(entailment, entailment.T)
        assert torch.allclose(cosine.diagonal(), torch.ones(3), atol=1e-5)
        assert entailment.min() >= 0
        assert entailment.max() <= 1
    same, different = result["similarity"]
    assert same["same_text"] == 1.0
    assert same["cosine_between_heads"] == pytest.approx(1.0, abs=1e-5)
    assert same["cosine_to_target"] == pytest.approx([1.0] * 3, abs=1e-5)
    assert different["cosine_between_heads"] < 1.0 - 1e-4
    assert "cosine, p_drop=0.4" in done.out
    _, shown = _tables(tmp_path / "s.json")
    assert f"`{bert['encoder']}`, `{bert['nli']}`" in table([(tmp_path / "s.json", "s.json")])
    assert shown[1][2] == f"{different['cosine'][0][1]:.3f} / {different['entailment'][0][1]:.3f}"


def test_embeddings_are_means_over_a_texts_own_tokens(bert: dict[str, str]) -> None:
    encoder = load_encoder(bert["encoder"])
    texts = ["the sky is blue", "a train", "the sky is blue"]
    vectors = encoder(texts)
    tokenizer, model = tiny.tokenizer(), BertModel.from_pretrained(bert["encoder"]).eval()
    for text, vector in zip(texts, vectors, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        mean = model(ids).last_hidden_state[0].mean(0)
        assert torch.allclose(vector, mean / mean.norm(), atol=1e-5)  # float32, padding beside none
    encoder(["word " * 200])
    assert (encoder.max_tokens, encoder.num_cut) == (64, 1)


def test_entailment_reads_the_label_of_the_config(bert: dict[str, str]) -> None:
    entails = load_entailment(bert["nli"])
    model = BertForSequenceClassification.from_pretrained(bert["nli"]).eval()
    tokenizer = tiny.tokenizer()
    pairs = [("the sky is blue", text) for text in (*QUESTIONS, *tiny.LINES)]
    expected = [int(model(**tokenizer(a, b, return_tensors="pt")).logits.argmax()) == 2 for a, b in pairs]
    assert entails(pairs) == expected
    with pytest.raises(ConfigError, match=r"LABEL_0, LABEL_1, LABEL_2, and none is 'entailment'"):
        load_entailment(bert["nameless"])


# -- bench batch ----------------------------------------------------------------------------------------------------


def test_batch_sets_dropmatch_against_lossless_by_size(
    command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        *("bench", "batch", "--data", data, "--target", pair.target, "--draft", pair.draft, "--batches", "1,3,4"),
        *("-n", "6", "-L", "3", "--p-drop", "0.1", "--output", tmp_path / "b.json"),
    )
    add, count = Journal.add, 0

    def stop_once(journal: Journal, entry: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        add(journal, entry)

    monkeypatch.setattr(Journal, "add", stop_once)
    assert command(*arguments).code == 130
    write = batch.write_result

    def write_alone(result: Any, output: Path) -> None:
        """The journal was let go before its run was written, and another run's then removed."""
        with pytest.raises(ConfigError, match="Another run is writing"):
            Journal(output, {})
        write(result, output)

    monkeypatch.setattr(batch, "write_result", write_alone)
    done = command(*arguments)
    assert done.code == 0, done.err
    assert "b.json.journal (left on 2" in done.err
    assert "UTC): 5 of 12 runs of a wave." in done.err
    result = _read(tmp_path / "b.json")
    assert [(row["batch"], row["waves"]) for row in result["summary"]] == [(1, 4), (3, 1), (4, 1)]
    for row in result["summary"]:
        for arm in ("lossless", "dropmatch"):
            assert row[arm]["tokens_per_second"] < row[arm]["decode_tokens_per_second"]
            assert 1.0 <= row[arm]["tau"] <= 4.0
        for name in ("whole", "decode"):
            ratio = row[f"{name}_over_lossless"]
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
        assert row["lossless"]["lossy_share"] == 0.0
        assert row["dropmatch"]["tau"] >= row["lossless"]["tau"] * 0.9
    emitted = {(r["batch"], r["arm"], r["wave"]): r["emitted"] for r in result["runs"]}
    assert all(tokens == 6 * batch for (batch, _, _), tokens in emitted.items())
    assert len(result["runs"]) == len(emitted) == 12
    assert "decoding only" in done.out
    (shown,) = _tables(tmp_path / "b.json")
    assert column(shown, "tau")[0] == ", ".join(
        f"{result['summary'][0][arm]['tau']:.2f}" for arm in ("lossless", "dropmatch")
    )


def test_a_size_that_fits_only_at_first_is_left_out(
    command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waves = batch._run, []

    def run(decoder: Any, prompts: Any, params: Any, *rest: Any) -> Any:
        waves.append(len(prompts))
        if waves.count(2) > 4:  # two warm-ups and the first wave of both
            raise torch.OutOfMemoryError
        return real(decoder, prompts, params, *rest)

    monkeypatch.setattr(batch, "_run", run)
    done = command("bench", "batch", "--data", data, "--target", pair.target, "--draft", pair.draft, "-n", "4",
                   "--batches", "1,2,4", "-L", "2", "--p-drop", "0.1", "--output", tmp_path / "b.json")  # fmt: skip
    assert done.code == 0, done.err
    result = _read(tmp_path / "b.json")
    assert [row["batch"] for row in result["summary"]] == [1]
    assert result["settings"]["out_of_memory_at"] == 2
    assert [run["batch"] for run in result["runs"]].count(2) == 2
    assert 4 not in waves


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batches", "1,x"), "--batches='1,x' is not allowed"),
        (("--batches", "8"), "has 4 items, and 8 were asked for"),
        (("--batches", "4", "--num", "3"), "A batch of 4 needs as many prompts, and 3 were given"),
        (("--rule", "lossless", "--batches", "1"), "set against lossless"),
        (("--rule", "dropmatsch", "--batches", "1"), "Did you mean 'dropmatch'"),
    ],
)
def test_bad_batch_options_are_refused(
    command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    output = tmp_path / "b.json"
    done = command("bench", "batch", "--data", data, "--target", pair.target, "--output", output, *arguments)
    assert done.code == 2
    assert message in done.err
