"""Who may import whom: ops <- core <- {drafters, hf} <- {bench} <- cli; errors, config and provenance are leaves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dropmatch

ROOT = Path(dropmatch.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

LIBRARY = {"eagle3", "hf", "drafters", "core", "ops", "errors", "config", "provenance"}
# what each part of the package may import of it; a part is a folder or a module beside it
ALLOWED = {
    "errors": set(),
    "provenance": set(),
    "config": {"errors"},
    "ops": {"ops", "errors"},
    "core": {"core", "ops", "errors", "config"},
    "drafters": {"drafters", "core", "ops", "errors", "config"},
    "hf": {"hf", "core", "ops", "errors", "config", "provenance", "drafters"},
    "judge": {"judge", "core", "ops", "errors", "config"},
    "eagle3": {"eagle3", "hf", "core", "ops", "errors", "config"},
    "api": {"eagle3", "hf", "drafters", "core", "ops", "errors", "config", "provenance"},
    "bench": {"bench", "vllm", "judge", "api", *LIBRARY},
    "vllm": {"vllm", "core", "ops", "errors", "config"},
    "integrations": {"integrations", "api", "hf", "drafters", "core", "ops", "errors", "config", "provenance"},
    "training": {"training", "judge", "bench", "api", *LIBRARY},
    "report": {"report", "bench", *LIBRARY},
    "cli": {"cli", "report", "training", "judge", "integrations", "bench", "api", *LIBRARY},
}
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "gguf"}
CHILD = "dropmatch.bench.peers.child"  # runs as a script in an environment of other packages
TORCH_ONLY = {"ops", "core", "drafters"}  # of what is not in the standard library


def _part(module: str) -> str:
    """dropmatch.core.head -> core; the package itself -> ''."""
    return module.split(".")[1] if "." in module else ""


def _name(path: Path) -> str:
    parts = ["dropmatch", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imports(node: ast.AST, package: str, *, top_level_only: bool = False) -> list[str]:
    """Modules imported below a node, as dotted names; what only type checkers read is left out."""
    found: list[str] = []
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import):
            found += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - child.level + 1], base]).rstrip(".")
            found += [f"{base}.{alias.name}" if base == "dropmatch" else base for alias in child.names]
        found += _imports(child, package, top_level_only=top_level_only)
    return found


def _imports_of(path: Path, *, top_level_only: bool = False) -> list[str]:
    name = _name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _imports(ast.parse(path.read_text(encoding="utf-8")), package, top_level_only=top_level_only)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_import_only_from_the_layers_below(path: Path) -> None:
    part = _part(_name(path))
    if part == "":
        return  # the package itself names modules lazily
    assert part in ALLOWED, f"{part} has no place in the layers"
    for module in _imports_of(path):
        if module == "dropmatch" or not module.startswith("dropmatch."):
            continue
        assert _part(module) in ALLOWED[part], f"{_name(path)} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_hf_imports_transformers(path: Path) -> None:
    roots = {module.split(".")[0] for module in _imports_of(path)}
    if _part(_name(path)) != "hf" and _name(path) != CHILD:
        assert "transformers" not in roots


def test_what_runs_in_the_peers_environment_imports_nothing_of_ours() -> None:
    modules = _imports_of(ROOT.joinpath(*CHILD.split(".")[1:]).with_suffix(".py"))
    assert "transformers" in modules
    assert not any(module.startswith("dropmatch") for module in modules)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_the_plugin_and_its_benchmark_import_vllm(path: Path) -> None:
    roots = {module.split(".")[0] for module in _imports_of(path)}
    if _part(_name(path)) != "vllm" and _name(path) != "dropmatch.bench.vllm":
        assert "vllm" not in roots


@pytest.mark.parametrize("name", ["__init__", "install", "settings"])
def test_an_idle_plugin_imports_nothing_of_vllm_by_itself(name: str) -> None:
    """What vLLM loads in each of its processes must not load more of vLLM than the process already has."""
    path = ROOT / "vllm" / f"{name}.py"
    assert not any(module.startswith("vllm") for module in _imports_of(path, top_level_only=True))


@pytest.mark.parametrize("path", [path for path in MODULES if _part(_name(path)) in TORCH_ONLY], ids=_name)
def test_ops_core_and_drafters_need_torch_alone(path: Path) -> None:
    outside = {module.split(".")[0] for module in _imports_of(path)} - sys.stdlib_module_names - {"dropmatch"}
    assert outside <= {"torch"}


@pytest.mark.parametrize("name", ["errors", "config"])
def test_leaves_import_the_standard_library_alone(name: str) -> None:
    outside = {module.split(".")[0] for module in _imports_of(ROOT / f"{name}.py")} - sys.stdlib_module_names
    assert outside <= {"dropmatch"}


def test_core_reference_shares_no_code_with_the_tensor_version() -> None:
    modules = _imports_of(ROOT / "core" / "reference.py")
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", [path for path in MODULES if _part(_name(path)) in {"", "cli"}], ids=_name)
def test_command_line_imports_nothing_heavy_at_module_level(path: Path) -> None:
    roots = {module.split(".")[0] for module in _imports_of(path, top_level_only=True)}
    assert not roots & HEAVY


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    """What a module imports may import more, so one fresh interpreter is asked."""
    code = f"import sys, dropmatch.cli.commands; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout.split() == []


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT.parent)}
