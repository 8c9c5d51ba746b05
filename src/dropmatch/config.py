"""Settings as frozen dataclasses, each validated where it is made. A leaf: imports only errors.

Sources: `spec` names refer to the DropMatch paper (arXiv 2603.03333); where the paper leaves a point open the default
is documented in docs/method.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from dropmatch.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from dropmatch.core.acceptance import AcceptanceRule

MaskSharing = Literal["position", "round", "fixed"]
Noise = Literal["shared", "independent"]
Heads = Literal["full", "shortlist"]
Correction = Literal["plain", "centroid", "head1", "mode"]
PathPolicy = Literal["longest", "greedy-votes"]
TieBreak = Literal["plain", "first"]
PDrop = float | Literal["auto", "auto-expected"]

LogitsProcessor = Callable[..., Any]
"""(ids [R, S] int64, logits [R, V]) -> logits [R, V]; transformers' LogitsProcessor and LogitsProcessorList fit."""

StopCheck = Callable[[list[int]], bool]
"""ids of a row so far (prompt included) -> True to stop after the last of them."""


_COLDEST = 1e-4
_MOST_PATHS = 2**16 - 1  # path and purpose of a random number share one 32-bit word


def _check_range(name: str, value: float, low: float, high: float, *, open_high: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name}={value!r} is not allowed. Give a number.")
    inside = low <= value < high if open_high else low <= value <= high
    if not inside:
        bracket = ")" if open_high else "]"
        raise ConfigError(f"{name}={value!r} is out of range. Allowed: [{low}, {high}{bracket}.")


def _check_count(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} is not allowed. Give a whole number of at least {low}.")


def check_seed(seed: int) -> None:
    """Raise ConfigError unless seed is a whole number in [0, 2**63)."""
    _check_count("seed", seed, 0)
    if seed >= 2**63:
        raise ConfigError(f"seed={seed!r} is out of range. Allowed: [0, 2**63).")


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise UnknownNameError unless value is one of the allowed names."""
    names = tuple(allowed)
    if value not in names:
        raise UnknownNameError(name, str(value), names)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """Monte Carlo dropout on the LM head's input (Eq. 1-3).

    num_paths: K, the number of dropout paths. p_drop: chance that a coordinate is dropped, in [0, 1), or "auto" to
    pick it from the model's own radius, sampled or, for rules in closed form, expected; "auto-expected" takes the
    expected radius under any rule.
    mask_sharing: "position" draws fresh masks for each position, "round" one set per verification, "fixed" one set.
    noise: how path tokens are sampled at temperature > 0: "shared" Gumbel noise (p_drop=0 is then exactly lossless)
    or "independent" noise per path (biased towards the draft; for comparison only).
    heads: "shortlist" projects every path on the shortlist_size likeliest tokens of the plain head, with the mass
    behind them carried as one more token; "full" on the whole vocabulary. Sampled rows, rows with processed logits,
    heads that show no weight and drafters without a distribution are always done in full.
    """

    num_paths: int = 5
    p_drop: PDrop = 0.3
    mask_sharing: MaskSharing = "position"
    noise: Noise = "shared"
    heads: Heads = "shortlist"
    shortlist_size: int = 1024

    def __post_init__(self) -> None:
        _check_count("num_paths", self.num_paths, 1)
        _check_range("num_paths", self.num_paths, 1, _MOST_PATHS)
        check_choice("mask_sharing", self.mask_sharing, ("position", "round", "fixed"))
        check_choice("noise", self.noise, ("shared", "independent"))
        check_choice("heads", self.heads, ("full", "shortlist"))
        _check_count("shortlist_size", self.shortlist_size, 2)
        if isinstance(self.p_drop, str):
            check_choice("p_drop", self.p_drop, ("auto", "auto-expected"))
        else:
            _check_range("p_drop", self.p_drop, 0.0, 1.0, open_high=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for.

    max_new_tokens, min_new_tokens: length caps; EOS is masked before the minimum is reached.
    temperature: 0 is greedy. top_k (0: off), top_p, min_p act on sampling only, in this order.
    repetition_penalty: divides positive and multiplies negative logits of tokens already in the row.
    suppress_tokens: ids that are never produced.
    eos_ids: end-of-sequence ids; None takes the model's own, an empty tuple ignores EOS.
    stop: strings that end the text, in front of which it is cut. include_stop: keep the string in the text.
    draft_length: most drafted tokens per round; None takes the engine's.
    rule: acceptance rule by name or object; None takes the engine's.
    seed: keys masks and sampling noise together with the position only, so that equal seeds give equal decisions
    whatever the batch; None derives the key from the engine's seed and the request's number.
    stream: numbers several samples of one seed. logprobs: report the target's log-probability of each token.
    processors, stop_checks: further logits processors and stopping criteria, applied per row.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    draft_length: int | None = None
    rule: str | AcceptanceRule | None = None
    seed: int | None = 0
    stream: int = 0
    logprobs: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    stop_checks: tuple[StopCheck, ...] = ()

    def __post_init__(self) -> None:
        _check_count("max_new_tokens", self.max_new_tokens, 1)
        _check_count("min_new_tokens", self.min_new_tokens, 0)
        _check_count("top_k", self.top_k, 0)
        _check_count("stream", self.stream, 0)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < _COLDEST:
            raise ConfigError(
                f"temperature={self.temperature!r} is too small to divide by. Give 0 for greedy decoding."
            )
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if not self.repetition_penalty > 0:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty!r} is not allowed. Give a positive number.")
        if self.draft_length is not None:
            _check_count("draft_length", self.draft_length, 0)
        if self.seed is not None:
            check_seed(self.seed)
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop={self.stop!r} is not allowed. Give a tuple of strings that are not empty.")

    @property
    def needs_processing(self) -> bool:
        """True if logits are changed before the argmax."""
        return bool(
            self.processors or self.suppress_tokens or self.min_new_tokens > 0 or self.repetition_penalty != 1.0
        )

    @property
    def needs_warping(self) -> bool:
        """True if sampling is restricted by top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of a whole engine.

    draft_length: drafted tokens per round where a request does not say. max_batch: most rows decoded together; others
    wait. seed: for requests without one. correction: where the token after a rejection comes from under rules that ask
    the dropout heads: the undropped target ("plain"), their "centroid", the first of them ("head1") or their "mode"; a
    drafted token that was refused does not come back. protect_eos: a drafted EOS is kept only if the
    target's own argmax agrees.
    path_policy: which kept path of a draft tree is taken: the "longest", or the one that takes the best kept child at
    every node ("greedy-votes": shorter, nearer to the target). tie_break: between paths of equal length, "plain"
    prefers the target's own token, then more votes, then the more probable one, from the root down; "first" takes the
    path that was drafted first, as a small change to the official EAGLE code would.
    max_length: most tokens of a row, prompt included (None: the model's limit).
    """

    draft_length: int = 5
    max_batch: int = 32
    seed: int = 0
    correction: Correction = "plain"
    protect_eos: bool = False
    path_policy: PathPolicy = "longest"
    tie_break: TieBreak = "plain"
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check_count("draft_length", self.draft_length, 0)
        _check_count("max_batch", self.max_batch, 1)
        check_choice("path_policy", self.path_policy, ("longest", "greedy-votes"))
        check_choice("tie_break", self.tie_break, ("plain", "first"))
        check_choice("correction", self.correction, ("plain", "centroid", "head1", "mode"))
        check_seed(self.seed)
        if self.max_length is not None:
            _check_count("max_length", self.max_length, 2)
