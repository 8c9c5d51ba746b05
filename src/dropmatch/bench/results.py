"""Results files: JSON, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_result(result: dict[str, Any], output: Path) -> None:
    """Write a results file under a temporary name and rename it. Folders are made as needed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(output)
