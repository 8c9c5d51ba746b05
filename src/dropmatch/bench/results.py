"""Results files: JSON, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(result: dict[str, Any], output: Path) -> None:
    """Write a results file under a temporary name and rename it. Folders are made as needed."""
    write_whole(json.dumps(result, indent=1, allow_nan=False) + "\n", output)


def write_whole(text: str, output: Path) -> None:
    """Write a text file under a temporary name and rename it. Folders are made as needed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(output)


def with_lines(head: Mapping[str, Any], key: str, body: str) -> str:
    """JSON of an object whose last key holds body, which is JSON with one record a line: a large file then stays
    readable, and its diffs small."""
    return json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}") + f",\n {json.dumps(key)}: {body}\n}}\n"
