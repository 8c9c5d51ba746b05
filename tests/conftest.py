"""Options of the whole suite: real weights, GPUs and the folder of shared data are asked for, never assumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-model", action="store_true", help="run the tests that need real model weights")
    parser.addoption("--renew-costs", action="store_true", help="record the counts of tests/costs.json anew")
    parser.addoption(
        "--shared",
        metavar="DIR",
        default=os.environ.get("DROPMATCH_SHARED", str(REPOSITORY.parent / "shared")),
        help="folder of shared test data (default: $DROPMATCH_SHARED, else ../shared beside the repository)",
    )
    parser.addoption(
        "--speculators-python",
        metavar="PYTHON",
        default=os.environ.get("DROPMATCH_SPECULATORS_PYTHON"),
        help="interpreter of an environment with the speculators package (default: $DROPMATCH_SPECULATORS_PYTHON)",
    )
    parser.addoption(
        "--peers-python",
        metavar="PYTHON",
        default=os.environ.get("DROPMATCH_PEERS_PYTHON"),
        help="interpreter of the environment that `dropmatch bench peers --prepare` makes (default: "
        "$DROPMATCH_PEERS_PYTHON)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not config.getoption("--run-model"):
        reasons["model"] = "needs real model weights; run with --run-model"
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs CUDA"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def speculators_python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has the speculators package; skips where none was named."""
    python = request.config.getoption("--speculators-python")
    if not python:
        pytest.skip("needs an interpreter with the speculators package (--speculators-python PYTHON)")
    return str(python)


@pytest.fixture(scope="session")
def peers_python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has the peers' packages; skips where none was named."""
    python = request.config.getoption("--peers-python")
    if not python:
        pytest.skip("needs the peers' environment (--peers-python PYTHON; `dropmatch bench peers --prepare` makes it)")
    return str(python)


@pytest.fixture(scope="session")
def shared_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of shared data; skips where there is none."""
    folder = Path(request.config.getoption("--shared"))
    if not folder.is_dir():
        pytest.skip(f"needs the shared data, and {folder} does not exist (--shared DIR)")
    return folder
