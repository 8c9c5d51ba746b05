"""Reads the numbers of a pickled judge without running the pickle. Only `dropmatch train convert-judge` comes here.

A pickle is a program that names the functions to call. Here every name leads to an inert stand-in of this module or to
a refusal, so that neither scikit-learn nor numpy nor anything else is called with what the file says: objects become
bags of attributes, arrays are rebuilt from their raw bytes if those are plain numbers of the size that they claim.
Files of torch.save go through PyTorch's own weights_only loader.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dropmatch.core.judge import JudgeHead
from dropmatch.errors import ConfigError, DataError, IntegrityError
from dropmatch.judge.artefact import head_from

_MOST_BYTES = 64 << 20
_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")


class _UnreadableError(Exception):
    """What is wrong with a pickle, as the end of a sentence that begins with its name."""


class _Bag:
    """What is left of an object: its attributes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
            state = state[1]
        if isinstance(state, dict):
            self.attributes = dict(state)


class _DType:
    """A numpy dtype's name and byte order."""

    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = name
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

    def plain(self) -> np.dtype[Any]:
        if self.name not in _NUMBERS:
            raise _UnreadableError(f"holds an array of {self.name!r}, and only plain numbers are read")
        plain: np.dtype[Any] = np.dtype(self.name).newbyteorder(self.order)
        return plain


class _Array:
    """A numpy array whose state is read by `numbers`, never by numpy's own unpickling."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def numbers(self) -> np.ndarray[Any, Any]:
        state = self.state
        if not (isinstance(state, tuple) and len(state) == 5):
            raise _UnreadableError("holds an array without its contents")
        _, shape, dtype, is_fortran, raw = state
        return _rebuilt(raw, dtype, shape, bool(is_fortran))


class _Scalar:
    def __init__(self, dtype: Any = None, raw: Any = b"") -> None:
        self.value = _rebuilt(raw, dtype, (), False)


def _rebuilt(raw: Any, dtype: Any, shape: Any, is_fortran: bool) -> np.ndarray[Any, Any]:
    if isinstance(raw, str):
        raw = raw.encode("latin1")
    if not isinstance(raw, bytes | bytearray) or not isinstance(dtype, _DType) or not isinstance(shape, tuple):
        raise _UnreadableError("holds an array that is not plain numbers")
    plain = dtype.plain()
    if not all(isinstance(n, int) and 0 <= n < 2**31 for n in shape) or len(raw) != math.prod(shape) * plain.itemsize:
        raise _UnreadableError(f"holds an array of shape {shape} with {len(raw)} bytes, which does not fit")
    return np.frombuffer(bytes(raw), plain).reshape(shape, order="F" if is_fortran else "C").astype(np.float64)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Array:
    array = _Array()
    array.state = (1, shape, dtype, order == "F", bytes(buffer) if isinstance(buffer, bytes | bytearray) else None)
    return array


def _new_array(*_: Any) -> _Array:
    return _Array()


def _reconstructed(kind: Any, *_: Any) -> Any:
    return kind() if kind is _Bag else _Bag()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise _UnreadableError("holds bytes in an unknown encoding")
    return text.encode("latin1")


_STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    "multiarray": {"_reconstruct": _new_array, "scalar": _Scalar},
    "numeric": {"_frombuffer": _from_buffer},
}


class _Reader(pickle.Unpickler):
    """Resolves the few names that judges are made of, each to a stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"):
            made = _STAND_INS[module.rsplit(".", 1)[1]].get(name)
            if made is not None:
                return made
        if (module, name) == ("numpy", "ndarray"):
            return _Array
        if (module, name) == ("numpy", "dtype"):
            return _DType
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if (module, name) in (("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor")):
            return _reconstructed
        if (module, name) in (("builtins", "object"), ("__builtin__", "object")):
            return _Bag
        if module.startswith("sklearn.") and name in ("LogisticRegression", "StandardScaler"):
            return _Bag
        raise _UnreadableError(f"names {module}.{name}, which no judge needs")


def read_pickled_judge(path: Path, *, features: str = "DT", draft_size: int = 0, fold: int | None = None) -> JudgeHead:
    """The head of a pickle as Auto-Judge's scripts write it: {model, scaler, thresholds}, a list of such by fold, or
    the exported form. features, draft_size: what the head reads, which the pickle does not say; fold: which of a list.

    Raises IntegrityError naming the file and what is wrong with it.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the pickled judge.")
    if path.stat().st_size > _MOST_BYTES:
        raise IntegrityError(f"{path} has {path.stat().st_size >> 20} MiB, and a judge is far smaller.")
    try:
        value = _read(path)
        if isinstance(value, list | tuple):
            if fold is None or not 0 <= fold < len(value):
                raise ConfigError(f"{path} holds {len(value)} heads, one per fold. Name one with --fold, from 0 on.")
            value = value[fold]
        arrays = _arrays(value)
    except _UnreadableError as error:
        raise IntegrityError(f"{path} {error}.") from error
    return head_from(
        arrays,
        where=str(path),
        weight="weights",
        features=features,
        draft_size=draft_size,
        thresholds=arrays.get("thresholds", ()),
    )


def _read(path: Path) -> Any:
    raw = path.read_bytes()
    if raw[:2] == b"PK":
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            raise _UnreadableError(f"cannot be read by PyTorch's restricted loader ({error})") from error
    try:
        return _Reader(io.BytesIO(raw)).load()
    except _UnreadableError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise _UnreadableError(f"cannot be read as a pickle ({type(error).__name__}: {error})") from error


def _arrays(value: Any) -> dict[str, Any]:
    """The numbers of the exported form, or of {model, scaler, thresholds}, by the exported names."""
    inside = _inside(value)
    if "model" in inside or "scaler" in inside:
        model, scaler = _inside(inside.get("model")), _inside(inside.get("scaler"))
        found = {
            "mean": scaler.get("mean_"),
            "scale": scaler.get("scale_"),
            "weights": model.get("coef_"),
            "bias": model.get("intercept_"),
            "thresholds": inside.get("thresholds"),
        }
        return {name: _numbers(numbers) for name, numbers in found.items() if numbers is not None}
    names = ("mean", "scale", "weights", "bias", "thresholds")
    return {name: _numbers(inside[name]) for name in names if name in inside}


def _inside(value: Any) -> dict[str, Any]:
    """What a dictionary or an object holds, by name."""
    inside = value.attributes if isinstance(value, _Bag) else value
    return {str(key): item for key, item in inside.items()} if isinstance(inside, dict) else {}


def _numbers(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.numbers()
    if isinstance(value, _Scalar):
        return value.value
    return [_numbers(item) for item in value] if isinstance(value, list | tuple) else value
