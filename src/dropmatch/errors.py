"""Every error that dropmatch raises on purpose. One family, so that a caller can catch it whole.

    DropMatchError
    ├── ConfigError (ValueError)             an option has a value that is not allowed
    │   └── UnknownNameError                 a rule, preset or option name that does not exist
    ├── StateError                           an object that an earlier error left unusable
    ├── ShapeError (ValueError)              tensors whose shapes do not fit together
    ├── UnsupportedModelError                a model that cannot be verified or rolled back
    ├── TokenizerMismatchError               draft and target do not read the same tokens
    ├── ModelNotFoundError                   weights that cannot be found or fetched
    ├── IntegrityError                       a file that is not what it should be (hash, size, format)
    ├── DataError (ValueError)               a user's file that cannot be read; names file and line
    └── EndpointError                        a service over HTTP that refuses, or does not answer

Every message says what was given, what is allowed and what to do. Imports nothing of dropmatch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DropMatchError(Exception):
    """Base of all errors raised on purpose by dropmatch."""


class ConfigError(DropMatchError, ValueError):
    """An option has a value that is not allowed."""


class UnknownNameError(ConfigError):
    """A name that does not exist, with near matches and all that do."""

    def __init__(self, kind: str, given: str, allowed: Iterable[str]) -> None:
        names = sorted(allowed)
        near = difflib.get_close_matches(given, names, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
        super().__init__(f"Unknown {kind} {given!r}.{hint} Available: {', '.join(names)}.")


class StateError(DropMatchError):
    """An object that an earlier error left unusable."""


class ShapeError(DropMatchError, ValueError):
    """Tensors whose shapes do not fit together."""


class UnsupportedModelError(DropMatchError):
    """A model that dropmatch cannot verify or roll back."""


class TokenizerMismatchError(DropMatchError):
    """Draft and target read different tokens."""


class ModelNotFoundError(DropMatchError):
    """Model weights that can be neither found nor fetched."""


class IntegrityError(DropMatchError):
    """A file that is not what it should be."""


class DataError(DropMatchError, ValueError):
    """A user's file that cannot be read."""


class EndpointError(DropMatchError):
    """A service over HTTP that refuses, or does not answer."""
