"""Checks of what a results file or a journal holds, so that a damaged one is named with the key that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dropmatch.core.reasons import Reason
from dropmatch.errors import DataError

NUMBER = (int, float)
MAYBE = (int, float, type(None))
_RECORD = {"tokens": list, "text": str, "reasons": list, "logprobs": list, "lossy": list, "judged": list}
_LOSSY = {"index": int, "token": int, "best_token": int, "prob": NUMBER, "best_prob": NUMBER, "reason": str}
_MOST: Final = 1e15  # beyond any figure of a run; sums and quotients of such numbers are still numbers
_MOST_TOKEN: Final = 2**31 - 1
_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    NUMBER: "a finite number",
    MAYBE: "a finite number or null",
    (str, type(None)): "text or null",
    (int, float, str): "a finite number or text",
    (bool, type(None)): "true, false or null",
    (dict, type(None)): "an object or null",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Checks of one file. where: its name, perhaps with a line; advice: what to do if it is damaged, as a sentence."""

    where: str
    advice: str

    def error(self, fault: str) -> DataError:
        """The error to raise for a fault."""
        return DataError(f"{self.where}: {fault}. {self.advice}")

    def check(self, at: str, value: Any, wanted: Mapping[str, Any]) -> None:
        """Check keys of one object and their kinds. at: its own key, empty for the whole file. Raises DataError."""
        if not isinstance(value, dict):
            raise self.error(f"{at or 'the whole'} is not an object")
        for key, kinds in wanted.items():
            name = f"{at}.{key}" if at else repr(key)
            if key not in value:
                raise self.error(f"{name} is missing")
            if not is_kind(value[key], kinds):
                raise self.error(f"{name} is {_fault(value[key], kinds)}")

    def entries(self, at: str, values: Iterable[Any], kinds: Any) -> None:
        """Check the kind of each entry of a list. Raises DataError."""
        wrong = [value for value in values if not is_kind(value, kinds)]
        if wrong:
            raise self.error(f"{at} has an entry that is {_fault(wrong[0], kinds)}")

    def record(self, at: str, record: Any) -> None:
        """Check one answer of a comparison. Raises DataError."""
        self.check(at, record, _RECORD)
        tokens = len(record["tokens"])
        for key in ("reasons", "logprobs", "pieces"):
            if key in record and (not isinstance(record[key], list) or len(record[key]) != tokens):
                raise self.error(f"{at}.{key} is not a list of {tokens} entries, one for each token")
        for key, kind in (("tokens", int), ("reasons", int), ("logprobs", NUMBER), ("pieces", str)):
            self.entries(f"{at}.{key}", record.get(key, ()), kind)
        known = {int(reason) for reason in Reason}
        unknown = next((code for code in record["reasons"] if code not in known), None)
        if unknown is not None:
            raise self.error(f"{at}.reasons has {unknown!r}, which is none of the codes 0 to {max(known)}")
        for i, token in enumerate(record["lossy"]):
            self.check(f"{at}.lossy[{i}]", token, _LOSSY)
            if not is_kind(token.get("best_piece", ""), str):
                raise self.error(f"{at}.lossy[{i}].best_piece is not text")
        for token in (*record["tokens"], *(lossy["best_token"] for lossy in record["lossy"])):
            if not 0 <= token <= _MOST_TOKEN:
                raise self.error(f"{at} has {token}, which is no token")
        for i, entry in enumerate(record["judged"]):
            if (
                not isinstance(entry, list)
                or len(entry) < 5
                or not all(
                    is_kind(value, kind) for value, kind in zip(entry, (int, MAYBE, MAYBE, int, MAYBE), strict=False)
                )
                or entry[3] not in known
                or entry[0] >= tokens
            ):
                raise self.error(f"{at}.judged[{i}] is not [index, divergence, radius, reason, probability]")


def _fault(value: Any, kinds: Any) -> str:
    is_number = isinstance(value, NUMBER) and not isinstance(value, bool) and abs(value) < math.inf
    return "too large a number" if is_number and abs(value) > _MOST else f"not {_NAMES[kinds]}"


def is_kind(value: Any, kinds: Any) -> bool:
    """Like isinstance, but true is no number, and neither are NaN, infinity and what is larger than any figure."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) and not (isinstance(value, NUMBER) and not abs(value) <= _MOST)
