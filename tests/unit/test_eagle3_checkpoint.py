"""EAGLE-3 checkpoints: both families, every switch, and files that must not be believed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eagle
from dropmatch.eagle3.checkpoint import TargetFacts, is_eagle3_folder, load_head, save_head
from dropmatch.eagle3.model import Eagle3Head
from dropmatch.eagle3.settings import config_json, default_taps, is_eagle3, parse_settings
from dropmatch.errors import ConfigError, IntegrityError, ModelNotFoundError, UnsupportedModelError
from dropmatch.training.lookahead import lookahead

EMBEDDING = torch.randn(eagle.V, eagle.H, generator=torch.Generator().manual_seed(1))
FACTS = TargetFacts(eagle.H, eagle.NUM_LAYERS, eagle.V, EMBEDDING)
OFFICIAL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "/nowhere/private"}},
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "vocab_size": 128256,
    },
}  # fmt: skip


def load(folder: Path, facts: TargetFacts = FACTS, **options: Any) -> Eagle3Head:
    return load_head(folder, facts, dtype=torch.float32, device=torch.device("cpu"), **options)


def outputs(head: Eagle3Head) -> list[Tensor]:
    """Logits of three steps on fixed tokens and states."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(eagle.V, (2, 10), generator=generator)
    taps = torch.randn(2, 7, head.settings.num_taps * eagle.H, generator=generator)
    return [head.logits(out) for out in lookahead(head, ids, taps, 3)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_head(eagle.random_head(EMBEDDING), tmp_path / "head", dtype=torch.float32)
    return tmp_path / "head"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# -- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", eagle.VARIANTS)
def test_a_head_of_any_kind_comes_back_from_the_speculators_format(tmp_path: Path, name: str) -> None:
    head = eagle.random_head(EMBEDDING, **eagle.VARIANTS[name])
    save_head(head, tmp_path / "head", family="speculators", dtype=torch.float32)
    again = load(tmp_path / "head")
    assert replace(again.settings, rope={}) == replace(head.settings, rope={})
    assert again.settings.rope == dict(head.settings.rope)
    assert torch.equal(again.target_ids, head.target_ids)
    for a, b in zip(outputs(again), outputs(head), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["plain", "full-vocabulary", "two-taps"])
def test_both_families_give_equal_logits(tmp_path: Path, name: str) -> None:
    head = eagle.random_head(EMBEDDING, **eagle.VARIANTS[name])
    heads = []
    for family in ("official", "speculators"):
        save_head(head, tmp_path / family, family=family, dtype=torch.float32)
        heads.append(load(tmp_path / family))
    for a, b in zip(outputs(heads[0]), outputs(heads[1]), strict=True):
        assert torch.equal(a, b)
    names = {family: set(load_file(tmp_path / family / "model.safetensors")) for family in ("official", "speculators")}
    assert names["speculators"] - names["official"] == {
        "embed_tokens.weight",
        *(name.replace("midlayer.", "layers.0.") for name in names["official"] if name.startswith("midlayer.")),
    }
    assert heads[0].embedding is EMBEDDING  # not stored, or stored and equal: shared with the target
    assert heads[1].embedding is EMBEDDING


@pytest.mark.parametrize("name", ["norm-before-residual", "fc-norm", "three-layers", "qwen3", "biases", "llama3-rope"])
def test_what_the_official_format_cannot_say_is_refused_on_writing(tmp_path: Path, name: str) -> None:
    head = eagle.random_head(EMBEDDING, **eagle.VARIANTS[name])
    with pytest.raises(ConfigError, match="speculators"):
        save_head(head, tmp_path / "head", family="official")
    assert not (tmp_path / "head").exists()


def test_half_precision_is_written_by_default_and_overflow_is_refused(tmp_path: Path) -> None:
    head = eagle.random_head(EMBEDDING)
    save_head(head, tmp_path / "head")
    assert load_file(tmp_path / "head" / "model.safetensors")["fc.weight"].dtype == torch.float16
    with torch.no_grad():
        head.norm.weight[3] = 1e6
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        save_head(head, tmp_path / "head")
    assert bool(load(tmp_path / "head").norm.weight.isfinite().all())  # the good one is still there


def test_an_own_embedding_is_kept_where_it_differs(tmp_path: Path) -> None:
    head = eagle.random_head(EMBEDDING + 1.0)
    save_head(head, tmp_path / "head", family="speculators", dtype=torch.float32)
    assert torch.equal(load(tmp_path / "head").embedding, EMBEDDING + 1.0)


def test_pickles_and_shards_are_read_like_one_safetensors_file(saved: Path) -> None:
    expected = outputs(load(saved))
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save({**tensors, "of.no.use": torch.zeros(1)}, saved / "pytorch_model.bin")
    assert all(torch.equal(a, b) for a, b in zip(outputs(load(saved)), expected, strict=True))
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, saved / f"part-{number}.safetensors")
    index = {name: f"part-{int(name in names[5:])}.safetensors" for name in names}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save({}, saved / "pytorch_model.bin")  # safetensors come first
    assert all(torch.equal(a, b) for a, b in zip(outputs(load(saved)), expected, strict=True))


# -- configs --------------------------------------------------------------------------------------------------------


def test_an_official_config_is_read_with_the_official_defaults() -> None:
    settings = parse_settings(OFFICIAL, "config.json")
    assert (settings.family, settings.head_dim, settings.draft_vocab_size) == ("official", 128, 32000)
    assert settings.norm_before_residual is False
    assert settings.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert settings.tap_layers is None
    assert settings.taps_of(32) == (2, 16, 29)


def test_a_speculators_config_is_read_with_its_own() -> None:
    settings = parse_settings(NESTED, "config.json")
    assert (settings.family, settings.vocab_size, settings.target_hidden_size) == ("speculators", 128256, 4096)
    assert settings.rope["rope_type"] == "llama3"
    assert settings.rope["rope_theta"] == 500000.0
    missing = {key: value for key, value in NESTED.items() if key != "norm_before_residual"}
    assert parse_settings(missing, "config.json").norm_before_residual is True
    assert parse_settings({**NESTED, "norm_before_residual": False}, "config.json").norm_before_residual is False


@pytest.mark.parametrize(
    ("config", "offset", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, None, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, None, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 0, (1, 15, 28)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, 1, (2, 16, 29)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None, (2, 16, 29)),
        ({}, None, (2, 16, 29)),
    ],
)
def test_tap_ids_follow_the_convention_of_their_place(
    config: dict[str, Any], offset: int | None, expected: tuple[int, ...]
) -> None:
    assert parse_settings({**OFFICIAL, **config}, "config.json", tap_offset=offset).taps_of(32) == expected


def test_default_taps_need_seven_layers() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(80) == (2, 40, 77)
    assert default_taps(7) == (2, 3, 4)
    with pytest.raises(UnsupportedModelError, match="6 layers"):
        default_taps(6)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "4096"},
        {"hidden_size": 0},
        {"hidden_size": 10**12},
        {"num_attention_heads": 33},
        {"num_key_value_heads": 5},
        {"num_hidden_layers": 10**6},
        {"draft_vocab_size": 200000},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 10**400},
        {"rope_theta": -1.0},
        {"rope_theta": 10**400},
        {"rope_scaling": "yes"},
        {"norm_before_residual": "false"},
        {"norm_before_fc": True, "fc_norm": True},
        {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]},
        {"eagle_aux_hidden_state_layer_ids": [-3]},
        {"eagle_aux_hidden_state_layer_ids": "2,3"},
        {"eagle_config": []},
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"config\.json"):
        parse_settings({**OFFICIAL, **changes}, "config.json")


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"eagle_config": {"use_aux_hidden_state": False}}])
def test_heads_of_another_kind_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        parse_settings({**OFFICIAL, **changes}, "config.json")


def test_heads_are_told_from_models_by_their_config(tmp_path: Path) -> None:
    assert is_eagle3(OFFICIAL)
    assert is_eagle3(NESTED)
    assert is_eagle3({"architectures": ["LlamaForCausalLMEagle3"]})
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32})
    assert not is_eagle3_folder(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'eagle'"):
        is_eagle3({"speculators_model_type": "eagle"})


def test_written_configs_read_back_as_they_were() -> None:
    for changes in eagle.VARIANTS.values():
        settings = replace(eagle.SETTINGS, **changes)
        written = json.loads(json.dumps(config_json(settings, target_name="t", dtype="float16")))
        assert parse_settings(written, "config.json") == replace(settings, rope=dict(settings.rope))


# -- files that do not fit or are hostile ---------------------------------------------------------------------------


def test_a_head_for_another_width_is_refused(saved: Path) -> None:
    facts = TargetFacts(48, eagle.NUM_LAYERS, eagle.V, torch.zeros(eagle.V, 48))
    with pytest.raises(UnsupportedModelError, match=r"fc\.weight.*48 wide"):
        load(saved, facts)


def test_a_head_whose_taps_the_target_lacks_is_refused(saved: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="layer 5"):
        load(saved, replace(FACTS, num_layers=5))


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight"],
)
def test_a_missing_or_misshapen_tensor_is_named(saved: Path, name: str) -> None:
    rewrite(saved, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        load(saved)
    rewrite(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        load(saved)


def test_sizes_in_a_config_cost_nothing_before_the_tensors_agree(saved: Path) -> None:
    reconfigure(saved, intermediate_size=2**24)
    with pytest.raises(IntegrityError, match="gate_proj"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: d2t.index_fill(0, torch.tensor([7]), 10_000), r"'d2t'.*target ids from"),
        (lambda d2t: d2t.index_fill(0, torch.tensor([7]), -10_000), r"'d2t'.*target ids from"),
        (lambda d2t: d2t.index_fill(0, torch.tensor([7]), int(d2t[6]) - 1), r"'d2t'.*twice"),
        (lambda d2t: d2t[:-1].clone(), r"'d2t'.*shape \[199\]"),
        (lambda d2t: d2t.float(), r"'d2t'.*float32"),
    ],
)
def test_a_vocabulary_map_that_leads_astray_is_refused(
    saved: Path, change: Callable[[Tensor], Tensor], message: str
) -> None:
    rewrite(saved, lambda tensors: tensors.update(d2t=change(tensors["d2t"])))
    with pytest.raises(IntegrityError, match=message):
        load(saved)


def test_a_map_is_needed_where_vocabularies_differ(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(IntegrityError, match="'d2t'"):
        load(saved)


def test_a_target_with_fewer_tokens_is_refused(saved: Path) -> None:
    with pytest.raises(IntegrityError, match="target ids"):
        load(saved, replace(FACTS, vocab_size=100))


def test_an_embedding_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    save_head(eagle.random_head(EMBEDDING), tmp_path / "head", family="speculators")
    rewrite(tmp_path / "head", lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"][:100].clone()}))
    with pytest.raises(IntegrityError, match=r"embed_tokens\.weight"):
        load(tmp_path / "head")


def test_numbers_that_are_none_are_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors["fc.weight"].index_fill_(0, torch.tensor([1]), float("nan")))
    with pytest.raises(IntegrityError, match=r"fc\.weight"):
        load(saved)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_pickle_is_not_run(saved: Path, tmp_path: Path, is_zip: bool) -> None:
    (saved / "model.safetensors").unlink()
    bomb = {"fc.weight": _Bomb(tmp_path / "exploded")}
    if is_zip:
        torch.save(bomb, saved / "pytorch_model.bin")
    else:
        (saved / "pytorch_model.bin").write_bytes(pickle.dumps(bomb, protocol=2))
    with pytest.raises(IntegrityError, match="a pickle can run code"):
        load(saved)
    assert not (tmp_path / "exploded").exists()


def test_files_that_are_no_checkpoints_are_refused(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(IntegrityError, match="cannot be read"):
        load(saved)
    weights.unlink()
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        load(saved)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../x.safetensors"}}))
    with pytest.raises(IntegrityError, match="no safetensors file of its folder"):
        load(saved)
    (saved / "model.safetensors.index.json").unlink()
    torch.save([1, 2], saved / "pytorch_model.bin")
    with pytest.raises(IntegrityError, match="no dictionary"):
        load(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(IntegrityError, match="damaged"):
        load(saved)


def pickled(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype|deprecated)")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fc.weight", lambda tensor: tensor.to_sparse()),
        ("fc.weight", lambda tensor: tensor.to_sparse_csr()),
        ("fc.weight", lambda tensor: tensor.to("meta")),
        ("lm_head.weight", lambda tensor: torch.zeros(1).expand(tensor.shape)),
        ("d2t", lambda tensor: tensor.to("meta")),
        ("d2t", lambda tensor: tensor.to_sparse()),
        ("embed_tokens.weight", lambda tensor: torch.zeros(1).expand(2**40, eagle.H)),
    ],
)
def test_tensors_that_are_not_plain_memory_are_refused(
    saved: Path, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """A single number can stand for terabytes, and operators do not know tensors without data."""
    pickled(saved, lambda tensors: tensors.update({name: change(tensors.get(name, EMBEDDING))}))
    with pytest.raises(IntegrityError, match=rf"{name}.*no plain dense tensor".replace(".weight", r"\.weight")):
        load(saved)


def test_weights_of_less_than_16_bits_are_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(IntegrityError, match=r"fc\.weight.*float8"):
        load(saved)


def test_weights_that_the_targets_type_cannot_hold_are_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors["norm.weight"].fill_(1e6))
    with pytest.raises(ConfigError, match=r"norm\.weight.*float16 cannot hold"):
        load_head(saved, FACTS, dtype=torch.float16, device=torch.device("cpu"))
    load(saved)


def test_a_tensor_under_both_its_names_is_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"layers.0.hidden_norm.weight": torch.ones(eagle.H)}))
    with pytest.raises(IntegrityError, match=r"hidden_norm\.weight.*twice"):
        load(saved)


def test_json_that_is_nested_without_end_is_refused(saved: Path) -> None:
    config = (saved / "config.json").read_text()
    (saved / "config.json").write_text('{"draft_vocab_size": 200, "a": ' + "[" * 100_000)
    assert not is_eagle3_folder(saved)
    with pytest.raises(IntegrityError, match="damaged"):
        load(saved)
    (saved / "config.json").write_text(config)
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(IntegrityError, match="damaged"):
        load(saved)


def test_any_bytes_in_a_pickles_place_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    for data in (b"", b"\x80\x02.", b"PK\x03\x04", b"\x80\x04\x95" + b"\xff" * 9):
        (saved / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(IntegrityError, match=r"pytorch_model\.bin"):
            load(saved)


def test_names_that_are_no_list_make_no_head() -> None:
    assert not is_eagle3({"architectures": 5})


@pytest.mark.parametrize("limit", [0, 100, 20_000])
def test_a_head_that_cannot_be_written_leaves_the_one_that_was_there(saved: Path, limit: int) -> None:
    """The disk is full after so many bytes of a file."""
    resource = pytest.importorskip("resource")
    expected = outputs(load(saved))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            save_head(eagle.random_head(EMBEDDING, seed=8), saved, extra={"a": "b" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in saved.parent.iterdir()} == {saved.name}
    assert all(torch.equal(a, b) for a, b in zip(outputs(load(saved)), expected, strict=True))
    save_head(eagle.random_head(EMBEDDING, seed=8), saved)
    assert {path.name for path in saved.parent.iterdir()} == {saved.name}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": float("inf")},
        {"rope_theta": 1e-300},
    ],
)
def test_rope_whose_frequencies_are_no_numbers_is_refused(saved: Path, rope: dict[str, Any]) -> None:
    reconfigure(saved, rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="cannot be used"):
        load(saved)


def test_rope_that_depends_on_length_is_refused(saved: Path) -> None:
    reconfigure(saved, rope_scaling={"type": "longrope", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="longrope"):
        load(saved)
    reconfigure(saved, rope_scaling={"type": "linear"})
    with pytest.raises(UnsupportedModelError, match="cannot be used"):
        load(saved)


# -- the speculators package ----------------------------------------------------------------------------------------

SUMMED = 1e-4
"""Of the largest logit: float32 sums in another order, carried through three steps."""
_THEIRS = """
import sys, torch
from speculators import SpeculatorModel
model = SpeculatorModel.from_pretrained(sys.argv[1])
weights = dict(model.state_dict())
seen = []
model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].clone()))
given = torch.load(sys.argv[3])
with torch.no_grad():
    model.eval()(given["taps"], given["ids"], torch.zeros(given["ids"].shape, dtype=torch.long), ttt_steps=3)
torch.save({"logits": torch.stack(seen), **{name: weights[name].float() for name in sys.argv[4:]}}, sys.argv[2])
"""


@pytest.mark.parametrize("variant", [name for name in eagle.VARIANTS if name != "two-taps"])
def test_the_speculators_package_loads_and_runs_what_we_write(
    tmp_path: Path, speculators_python: str, variant: str
) -> None:
    head = eagle.random_head(EMBEDDING, **eagle.VARIANTS[variant])
    eagle.target().save_pretrained(tmp_path / "target")  # their loader reads it too
    name = str(tmp_path / "target")
    save_head(head, tmp_path / "head", family="speculators", dtype=torch.float32, target_name=name)
    names = [parameter for parameter, _ in head.named_parameters()]
    generator = torch.Generator().manual_seed(9)
    ids, taps = torch.randint(eagle.V, (1, 128), generator=generator), torch.randn(1, 128, 96, generator=generator)
    torch.save({"ids": ids, "taps": taps}, tmp_path / "given.pt")
    files = [str(tmp_path / file) for file in ("head", "theirs.pt", "given.pt")]
    done = subprocess.run(
        [speculators_python, "-c", _THEIRS, *files, *names],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    for parameter, tensor in head.named_parameters():
        assert torch.equal(theirs[parameter], tensor), parameter
    ours = [head.logits(out)[0] for out in lookahead(head, torch.nn.functional.pad(ids, (1, 0)), taps, 3)]
    for a, b in zip(theirs["logits"], ours, strict=True):
        assert float((a - b).abs().max()) < SUMMED * float(b.abs().max())
