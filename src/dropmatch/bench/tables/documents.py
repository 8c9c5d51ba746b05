"""Where tables stand in a document, and which renderer makes the one that a results file and a form ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.bench.results import read_json
from dropmatch.bench.tables import (
    autojudge,
    closed_form,
    compare,
    eagle3,
    gpu,
    heads,
    judged,
    radius,
    scaling,
    serving,
    speed,
    tuning,
)
from dropmatch.bench.tables.markdown import Named
from dropmatch.errors import DataError, DropMatchError, UnknownNameError

_BLOCK = re.compile(r"(<!-- results:begin (\S[^\n]*?) -->\n).*?(<!-- results:end -->)", re.DOTALL)

# by kind, then by form; "" is the form of a block that names none
_TABLES: Mapping[str, Mapping[str, Callable[[Named], str]]] = {
    "bench-quick": {"": speed.quick},
    "bench-peers": {"": speed.peers},
    "bench-gpu": {"": gpu.gpu},
    "bench-scaling": scaling.FORMS,
    "bench-heads": {"": speed.shortlist},
    "bench-linears": {"": speed.linears},
    "bench-batch": {"": speed.batch},
    "analyze-overhead": {"": speed.overhead},
    "compare": {
        "": compare.every_figure,
        "pareto": compare.pareto,
        "pairs": compare.pairs,
        "seeds": compare.seeds,
        "speed": compare.timed,
        "generate": compare.over_generate,
    },
    "analyze-heads": {
        "": heads.all_parts,
        "paper-1": heads.accuracy,
        "paper-2": heads.votes,
        "paper-3": heads.divergence,
    },
    "analyze-similarity": {"": heads.similarity},
    "analyze-radius": {"": radius.radius},
    "bench-autojudge": {
        "": autojudge.all_parts,
        "paper-8": autojudge.table8,
        "paper-9": autojudge.table9,
        "figure-5": autojudge.figure5,
        "figure-6": autojudge.figure6,
    },
    "bench-eagle3": {"": eagle3.all_parts, "paper-7": eagle3.depths, "paper-10": eagle3.domains},
    "vllm": {"": serving.vllm},
    "closed-form-agreement": {"": closed_form.agreement},
    "tune": {"": tuning.finals, "screening": tuning.screening},
    "llm-judge": {"": judged.ratings},
}
_OF_SEVERAL: Mapping[str, Mapping[str, Callable[[Sequence[Named]], str]]] = {"compare": {"paper-6": compare.paper6}}


def render(text: str, root: Path) -> str:
    """The text with every table made anew. root: the folder that the results files' names start from."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_block(match[2].split(), root)}{match[3]}", text)


def _block(words: Sequence[str], root: Path) -> str:
    """words: file names, which end in .json, and perhaps a form behind them."""
    names = [word for word in words if word.endswith(".json")]
    if len(words) - len(names) > 1 or words[: len(names)] != names or not names:
        raise DataError(f"results:begin {' '.join(words)!r}: give results files (.json), then at most one form.")
    return table([(root / name, name) for name in names], words[-1] if len(words) > len(names) else "")


def table(files: Sequence[tuple[Path, str]], form: str = "") -> str:
    """The table of results files of one kind. files: path, and the name to show; form: "" for the usual one.

    Raises DataError if a file is missing, not of a known kind, or one too many; UnknownNameError for a form that its
    kind does not have.
    """
    results = [(_read(path), name) for path, name in files]
    kinds = list(dict.fromkeys(result["kind"] for result, _ in results))
    if len(kinds) > 1:
        raise DataError(f"{', '.join(name for _, name in files)} hold {' and '.join(kinds)}. Give files of one kind.")
    try:
        return _rendered(results, kinds[0], form)
    except DropMatchError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else f"a value is not what it should be ({error})"
        raise DataError(
            f"{', '.join(name for _, name in files)}: {what}. The file is damaged or of another version; measure again."
        ) from error


def _rendered(results: Sequence[Named], kind: str, form: str) -> str:
    one, several = _TABLES[kind], _OF_SEVERAL.get(kind, {})
    if form in several:
        return several[form](results)
    if form not in one:
        raise UnknownNameError(f"form of {kind}", form, [name for name in (*one, *several) if name])
    if len(results) > 1:
        raise DataError(
            f"{', '.join(name for _, name in results)}: this table takes one file. Give each its own block."
        )
    return one[form](results[0])


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path} does not exist. Run the command that makes it, or correct its name in the document.")
    result = read_json(path, "Write it again with the command that makes it.")
    kind = result.get("kind") if isinstance(result, dict) else None
    if not (isinstance(kind, str) and kind in _TABLES):
        raise DataError(f"{path} holds {kind!r}. Tables are made of: {', '.join(_TABLES)}.")
    return dict(result)


def main(paths: list[str]) -> None:
    """Rewrite the tables of these documents in place. Nothing is written if a table of any of them cannot be made.

    Raises DataError."""
    if not paths:
        raise DataError("No document was named. Name some: python -m dropmatch.bench.tables README.md docs/results.md")
    missing = next((path for path in paths if not Path(path).is_file()), None)
    if missing is not None:
        raise DataError(f"There is no document {missing!r}. Name Markdown files, from the folder of the repository.")
    texts = {path: render(path.read_text(encoding="utf-8"), Path.cwd()) for path in map(Path, paths)}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
