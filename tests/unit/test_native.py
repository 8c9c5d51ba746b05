"""Our own kernels for linear layers against float64 products, and what happens where they cannot be had."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from dropmatch.hf import native
from dropmatch.hf.fast_linears import made_like, speed_up_linears
from dropmatch.hf.head import HFHead
from dropmatch.hf.int4 import Int4Linear
from dropmatch.hf.model import HFModel
from dropmatch.hf.native import NativeLinear, fits_native
from dropmatch.hf.packed import PackedLinear

loader = importlib.import_module("dropmatch.hf.native.library")  # the package has a function of this name
UNIT = 2**-8  # largest relative error of rounding to bfloat16
needs_kernels = pytest.mark.skipif(native.library() is None, reason=f"no compiled kernels: {native.why_unavailable()}")


def make(inputs: int, features: int, *, bias: bool = True, scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(inputs + features)
    linear = nn.Linear(inputs, features, bias=bias)
    linear.weight.data *= scale
    return linear.bfloat16().requires_grad_(False)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_the_kernels_compile_where_there_is_a_compiler() -> None:
    """A missing library must have a reason that is not our own mistake."""
    reason = native.why_unavailable()
    assert (reason is None) == (native.library() is not None)
    assert reason is None or "does not compile" not in reason
    assert reason is None or "cannot be loaded" not in reason


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 61])
@pytest.mark.parametrize(("inputs", "features"), [(16, 1), (32, 33), (528, 48), (1536, 70), (1040, 17)])
def test_products_are_those_of_float64_rounded_once(rows: int, inputs: int, features: int, bias: bool) -> None:
    linear, x = make(inputs, features, bias=bias), normal(rows, inputs)
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    size = F.linear(x.double().abs(), linear.weight.double().abs())  # float32 sums err in proportion to it
    error = (NativeLinear(linear)(x).double() - exact).abs()
    assert (error <= UNIT * exact.abs() + 1e-6 * size).all()


@needs_kernels
@pytest.mark.parametrize("rows", [2, 6, 7, 12, 13, 40])
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int) -> None:
    layer, x = NativeLinear(make(896, 100)), normal(rows, 896)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(rows)])
    assert torch.equal(layer(x), alone)


@needs_kernels
def test_the_number_of_threads_changes_nothing() -> None:
    layer, x, before = NativeLinear(make(256, 300)), normal(7, 256), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_kernels
def test_shapes_strides_and_empty_inputs() -> None:
    linear = make(64, 40)
    layer, x = NativeLinear(linear), normal(3, 5, 64)
    assert layer(x).shape == (3, 5, 40)
    assert torch.equal(layer(x[:, ::2]), layer(x)[:, ::2])
    assert torch.equal(layer(x.transpose(0, 1)), layer(x).transpose(0, 1))
    assert layer(x[:0]).shape == (0, 5, 40)
    assert layer(x[0, 0]).shape == (40,)
    wide = nn.Linear(32, 40, bias=False, device="meta")
    wide.weight = nn.Parameter(linear.weight[:, 16:48], requires_grad=False)  # rows further apart than they are long
    assert torch.equal(NativeLinear(wide)(x[..., :32]), layer_of(linear.weight[:, 16:48].contiguous())(x[..., :32]))


def layer_of(weight: Tensor) -> NativeLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return NativeLinear(linear)


@needs_kernels
def test_what_is_not_a_number_stays_so() -> None:
    x = normal(2, 32)
    x[0, 3] = float("nan")
    x[1, 3] = float("inf")
    got, expected = NativeLinear(make(32, 16))(x), F.linear(x, make(32, 16).weight, make(32, 16).bias)
    assert got[0].isnan().all()
    assert torch.equal(got[1].isinf(), expected[1].isinf())


@needs_kernels
def test_gradients_go_through_torch() -> None:
    layer, x = NativeLinear(make(32, 16)), normal(2, 32).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[0], layer.weight.sum(0))


@needs_kernels
def test_a_bias_alone_can_be_trained() -> None:
    layer = NativeLinear(make(32, 16))
    assert layer.bias is not None
    layer.bias.requires_grad_()
    layer(normal(2, 32)).sum().backward()
    assert layer.bias.grad is not None


@needs_kernels
def test_inputs_that_do_not_fit_are_refused_as_torch_refuses_them() -> None:
    """Twice the width was taken for twice the rows, and written behind the end of the output."""
    for layer in (NativeLinear(make(64, 64)), Int4Linear(make(64, 64))):
        with pytest.raises(RuntimeError):
            layer(normal(2, 128))
        with pytest.raises(RuntimeError, match="dtype"):
            layer(normal(2, 64).float())
    layer = NativeLinear(make(64, 64)).float()  # cast, or moved, after it was made
    with pytest.raises(RuntimeError, match="dtype"):
        layer(normal(2, 64))
    assert layer(normal(2, 64).float()).dtype == torch.float32
    assert NativeLinear(make(64, 64)).to("meta")(normal(2, 64).to("meta")).is_meta


class Disguised(Tensor):
    """Says that it is bfloat16 on the CPU, like a quantiser's weights, and has no memory."""

    @staticmethod
    def __new__(cls, shape: tuple[int, int]) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device="cpu")  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return args[0]


@needs_kernels
def test_only_weights_and_biases_with_an_address_fit() -> None:
    spread, disguised = make(64, 64), make(64, 64)
    spread.bias = nn.Parameter(normal(64, 2)[:, 0], requires_grad=False)
    disguised.weight = nn.Parameter(Disguised((64, 64)), requires_grad=False)
    for linear in (spread, disguised):
        assert not fits_native(linear)
        assert not Int4Linear.fits(linear)


@needs_kernels
def test_a_long_prompt_is_that_of_its_rows_and_keeps_little_memory() -> None:
    """Every thread kept a float32 copy of the longest input it had seen."""
    linear, x, added = make(8192, 16), normal(1536, 8192), normal(1536, 16)
    page = os.sysconf("SC_PAGE_SIZE")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * page
    got = native.multiply(x, linear.weight, linear.bias, added)
    after = int(Path("/proc/self/statm").read_text().split()[1]) * page
    assert after - before < 32 * 2**20  # of the 48 MiB that all rows would take
    for row in (0, 479, 480, 481, 1535):
        alone = native.multiply(x[row : row + 1], linear.weight, linear.bias, added[row : row + 1])
        assert torch.equal(got[row : row + 1], alone)


@needs_kernels
def test_a_model_keeps_its_weights_and_answers_alike() -> None:
    model = tiny.target().bfloat16()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected = model(ids).logits.float()
        head = model.get_output_embeddings().weight
        assert speed_up_linears(model) == 2 * 7 + 1
        got = model(ids).logits.float()
    kind = NativeLinear if fits_native(make(32, 16)) else PackedLinear
    assert type(model.get_output_embeddings()) is kind
    assert (got - expected).norm() <= 0.01 * expected.norm()
    weight = HFHead(model).weight
    assert weight is not None
    assert weight.data_ptr() == head.data_ptr()  # no copy
    assert HFModel(model).vocab_size == 320  # and the load probe passes


@needs_kernels
def test_only_what_the_kernels_take_fits() -> None:
    assert fits_native(make(16, 1)) or torch.cpu._is_amx_tile_supported()
    assert not fits_native(make(24, 8))
    assert not fits_native(nn.Linear(16, 8))
    assert not fits_native(nn.Linear(16, 8, device="meta").bfloat16())
    assert not fits_native(nn.Embedding(16, 8).bfloat16())
    assert not fits_native(NativeLinear(make(16, 8)))
    assert type(made_like(NativeLinear(make(16, 8)), nn.Linear(16, 8))) is nn.Linear


@needs_kernels
@pytest.mark.parametrize("rows", range(1, 9))
def test_int4_products_are_those_of_the_rounded_numbers(rows: int) -> None:
    """Exactly the product of the weights' codes with inputs rounded to 8 bits in groups."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(16, (48, 96), generator=generator, dtype=torch.uint8)
    scales, middles = (torch.rand(48, 3, generator=generator).bfloat16() for _ in range(2))
    x, bias = normal(rows, 96), normal(48)
    packed = native.pack_int4(codes, scales, middles)
    assert packed.numel() == 48 * 96 * 5 // 8
    groups = x.float().view(rows, 3, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    rounded = ((groups * (127 / largest)).round() * largest / 127).double().view(rows, 96)
    values = (codes.double().view(48, 3, 32) - 8) * scales.double()[..., None] + middles.double()[..., None]
    exact = rounded @ values.view(48, 96).T + bias.double()
    got = native.multiply_int4(x, packed, bias, 48).double()
    assert ((got - exact).abs() <= UNIT * exact.abs() + 1e-5 * exact.abs().max()).all()


@needs_kernels
def test_int4_inputs_of_zero_give_the_bias() -> None:
    codes = torch.full((16, 32), 15, dtype=torch.uint8)
    ones = torch.ones(16, 1).bfloat16()
    bias = normal(16)
    packed = native.pack_int4(codes, ones, ones)
    assert torch.equal(native.multiply_int4(torch.zeros(1, 32).bfloat16(), packed, bias, 16)[0], bias)


@needs_kernels
def test_int4_inputs_that_are_not_numbers_give_none() -> None:
    """A maximum passes over a NaN, or does not, by where it stands."""
    codes = torch.randint(16, (16, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = native.pack_int4(codes, torch.ones(16, 2).bfloat16(), torch.ones(16, 2).bfloat16())
    for place in range(64):
        x = normal(2, 64)
        x[0, place] = float("nan")
        got = native.multiply_int4(x, packed, None, 16)
        assert got[0].isnan().all()
        assert got[1].isfinite().all()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since a library is looked for once."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


ASK = "from dropmatch.hf.native import library, why_unavailable; print(library() is None, why_unavailable())"


def test_they_can_be_turned_off() -> None:
    assert run(ASK, DROPMATCH_NATIVE="0").stdout.strip() == "True DROPMATCH_NATIVE turns them off"


@needs_kernels
def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    done = run(ASK, PATH=str(tmp_path), CXX="", DROPMATCH_CACHE=str(tmp_path))
    assert done.stdout.strip() == "True there is no C++ compiler (install g++, or set CXX)"


@needs_kernels
def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernels.cpp:1: error: no such luck" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    done = run(ASK, CXX=str(compiler), DROPMATCH_CACHE=str(cache))
    assert done.stdout.startswith("True ")
    assert "error: no such luck" in done.stdout
    assert list((cache / "native").iterdir()) == []


@needs_kernels
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be compiled into" in run(ASK, DROPMATCH_CACHE=str(file)).stdout


@needs_kernels
def test_a_folder_that_cannot_be_asked_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that its user may not enter: even whether the file exists raises."""
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path / ("long" * 100)))
    with pytest.raises(loader.NativeUnavailableError, match="cannot be compiled into"):
        loader._compiled(loader._compiler())


@needs_kernels
def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"")
    with pytest.raises(loader.NativeUnavailableError, match="delete it to compile anew"):
        loader._open(tmp_path / "kernels.so")


@needs_kernels
def test_loading_leaves_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that started during the check for one OpenMP runtime kept that check's one or two threads for good."""
    ask, seen, before = torch.get_num_threads, [], torch.get_num_threads()

    def ask_in_a_new_thread_too() -> int:
        thread = threading.Thread(target=lambda: seen.append(ask()))
        thread.start()
        thread.join()
        return ask()

    torch.set_num_threads(3)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_num_threads", ask_in_a_new_thread_too)
            patched.setattr(torch, "set_num_threads", lambda count: pytest.fail("this sets all new threads' number"))
            loader._open(loader._compiled(loader._compiler()))
        assert ask() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}


@needs_kernels
def test_one_compilation_serves_the_next_process(tmp_path: Path) -> None:
    assert run(ASK, DROPMATCH_CACHE=str(tmp_path)).stdout.strip() == "False None"
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat().st_mtime_ns
    assert run(ASK, DROPMATCH_CACHE=str(tmp_path)).stdout.strip() == "False None"
    assert made.stat().st_mtime_ns == before


@pytest.mark.skipif(not loader.has_avx512(), reason="this CPU has no AVX-512, so the other tests ran with AVX2")
@needs_kernels
def test_the_kernels_for_avx2_pass_too_where_there_is_avx512(pytestconfig: pytest.Config) -> None:
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", __file__, "-k", "not avx512"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        tests, capture_output=True, text=True, env=environment, cwd=pytestconfig.rootpath, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert run(ASK, ATEN_CPU_CAPABILITY="avx2").stdout.strip() == "False None"  # so nothing was skipped


@needs_kernels
def test_each_width_has_a_library_of_its_own(tmp_path: Path) -> None:
    """A cache folder that two machines share must not give one the other's."""
    ask = "; print(torch.backends.cpu.get_cpu_capability())"
    for capability in ("avx2", "default"):
        done = run("import torch; " + ASK + ask, DROPMATCH_CACHE=str(tmp_path), ATEN_CPU_CAPABILITY=capability)
        assert done.stdout.splitlines() == (
            ["False None", "AVX2"] if capability == "avx2" else ["True torch uses no AVX2 here", "DEFAULT"]
        )
    if loader.has_avx512():
        assert run(ASK, DROPMATCH_CACHE=str(tmp_path)).stdout.strip() == "False None"
    assert len(list((tmp_path / "native").iterdir())) == (2 if loader.has_avx512() else 1)
