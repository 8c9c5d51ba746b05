"""The Auto-Judge rule: keep a mismatch that a trained linear head believes will not change the answer.

The head reads hidden states that the forwards leave anyway: the target's, after the final norm and without dropout,
once it has read the drafted token ("DT"), or the draft model's followed by the target's ("DD-DT"). Pure tensors: files
are the business of `dropmatch.judge`. Source: Auto-Judge, as DropMatch (arXiv 2603.03333) uses it in Tables 8 and 9.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dropmatch.core.needs import Need
from dropmatch.core.reasons import Reason
from dropmatch.core.rivals import parse_options
from dropmatch.core.verification import Verification
from dropmatch.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from dropmatch.core.acceptance import RuleOptions

FEATURES = ("DT", "DD-DT")
NAME = "judge"


@dataclass(frozen=True, slots=True, eq=False)
class JudgeHead:
    """Logistic regression on scaled hidden states: p = sigmoid(weight · (h - mean) / scale + bias), the chance that a
    drafted token is important, which is to say that keeping it would change the answer.

    mean, scale, weight: [D]. features: "DT", the target's state, or "DD-DT", the draft model's and then the target's.
    draft_size: how many of the D numbers are the draft model's, 0 where features is "DT". thresholds: rising
    quantiles of p on validation labels, from the lowest to the highest at even steps; may be empty. name: for messages.
    Raises ConfigError naming what is wrong.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: float
    features: str = "DT"
    draft_size: int = 0
    thresholds: tuple[float, ...] = ()
    name: str = "judge"

    def __post_init__(self) -> None:
        if self.features not in FEATURES:
            raise ConfigError(f"features={self.features!r} is not allowed. Give {' or '.join(map(repr, FEATURES))}.")
        size = self.weight.numel()
        for name in ("mean", "scale", "weight"):
            tensor: Tensor = getattr(self, name)
            if tensor.dim() != 1 or tensor.numel() != size or size == 0:
                raise ConfigError(
                    f"{name!r} has shape {list(tensor.shape)} beside {size} weights. mean, scale and weight must be "
                    "lists of the same length."
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(f"{name!r} holds numbers that are not finite.")
        if not bool((self.scale > 0).all()):
            raise ConfigError("'scale' holds numbers that are not positive.")
        if not math.isfinite(self.bias):
            raise ConfigError(f"'bias' is {self.bias!r}, which is not finite.")
        inside = 0 < self.draft_size < size if self.features == "DD-DT" else self.draft_size == 0
        if not inside:
            raise ConfigError(
                f"'draft_size' is {self.draft_size}, which does not fit {self.features} of {size} numbers."
            )
        if not all(0.0 <= p <= 1.0 for p in self.thresholds) or list(self.thresholds) != sorted(self.thresholds):
            raise ConfigError("'thresholds' must be rising probabilities between 0 and 1.")

    @property
    def target_size(self) -> int:
        """Numbers that the target's hidden state must have."""
        return self.weight.numel() - self.draft_size

    @property
    def digest(self) -> str:
        """Tells heads apart that go by one name."""
        numbers = torch.cat([self.mean, self.scale, self.weight, torch.tensor([self.bias, *self.thresholds])])
        return hashlib.sha256(self.features.encode() + numbers.double().cpu().numpy().tobytes()).hexdigest()[:16]

    def probability(self, features: Tensor) -> Tensor:
        """Chance that each drafted token is important. features: [M, D]. Returns [M] float64."""
        device = features.device
        mean, scale, weight = (t.to(device, torch.float64) for t in (self.mean, self.scale, self.weight))
        # a sum of products, not a matmul, whose rounding would depend on how many rows are asked together
        return (((features.double() - mean) / scale * weight).sum(-1) + self.bias).sigmoid()

    def threshold(self, wanted: float | str) -> float:
        """A number as it is; a quantile such as "q0.2" of the validation labels, interpolated between stored ones."""
        if not isinstance(wanted, str):
            return wanted
        if not self.thresholds:
            raise ConfigError(f"The head {self.name!r} has no thresholds to take {wanted!r} from. Give a number.")
        at = float(wanted[1:]) * (len(self.thresholds) - 1)
        low, high = self.thresholds[math.floor(at)], self.thresholds[math.ceil(at)]
        return low + (high - low) * (at - math.floor(at))


def _is_threshold(value: object) -> bool:
    if isinstance(value, str):
        try:
            return value.startswith("q") and 0.0 <= float(value[1:]) <= 1.0
        except ValueError:
            return False
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf


def _read_threshold(text: str) -> float | str:
    return text if text.startswith("q") else float(text)


_THRESHOLD = {
    "is_allowed": _is_threshold,
    "read": _read_threshold,
    "allowed": "a number of at least 0, or a quantile from q0 to q1 such as q0.2",
}


@dataclass(frozen=True, slots=True)
class Judge:
    """Keep the target's own token, and a mismatch whose chance to be important is below the threshold.

    threshold: a number (0 keeps matches only, above 1 keeps all) or a quantile of the head's validation labels: q0.2
    keeps about a fifth of the mismatches, those that matter least. veto: a mismatch must also be among this many best
    tokens of the dropout heads' centroid (0: off; an experiment of ours). Draft trees are fine: each node is judged on
    the path that leads to it. Kept mismatches are reported as `judge`. The token after a rejection is the target's.
    """

    head: JudgeHead
    threshold: float | str = field(default="q0.2", metadata=_THRESHOLD)
    veto: int = field(default=0, metadata={"low": 0})

    def __post_init__(self) -> None:
        if not _is_threshold(self.threshold):
            raise ConfigError(f"Judge threshold={self.threshold!r} is not allowed. Give {_THRESHOLD['allowed']}.")
        if isinstance(self.veto, bool) or not isinstance(self.veto, int) or self.veto < 0:
            raise ConfigError(f"Judge veto={self.veto!r} is not allowed. Give a whole number of at least 0.")
        self.head.threshold(self.threshold)  # a head without quantiles shows now, not at the first mismatch

    @property
    def needs(self) -> frozenset[Need]:
        needs = {Need.TARGET_HIDDEN}
        if self.head.features == "DD-DT":
            needs.add(Need.DRAFT_HIDDEN)
        return frozenset(needs | {Need.HEADS} if self.veto else needs)

    @property
    def couples_draft(self) -> bool:
        return True

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        codes = (v.is_exact & ask).to(torch.int8) * int(Reason.EXACT)
        b, n = (ask & ~v.is_exact).nonzero(as_tuple=True)
        if len(b) == 0:
            return codes
        keep = self.head.probability(judge_features(v, b, n, self.head)) < self.head.threshold(self.threshold)
        b, n = b[keep], n[keep]
        if self.veto:
            stays = v.centroid_rank(b, n) < self.veto
            b, n = b[stays], n[stays]
        codes[b, n] = int(Reason.JUDGE)
        return codes

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return v.plain_at(node)


def judge_features(v: Verification, b: Tensor, n: Tensor, head: JudgeHead) -> Tensor:
    """What the head reads of drafted tokens (b, n) [M]: states behind the tokens themselves. Returns [M, D] float32.

    Raises ConfigError where the drafter gives no states, ShapeError where states have another size than the head's."""
    parts = [v.hidden[b, n].float()]
    wanted = [("target", head.target_size)]
    if head.features == "DD-DT":
        states = v.tree.draft_hidden
        if states is None:
            raise ConfigError(
                f"The judge {head.name!r} reads the draft model's hidden states (DD-DT), and this drafter gives none. "
                "Use a draft model of its own, or a judge trained with --features DT."
            )
        parts.insert(0, states[b, n].to(v.hidden.device).float())
        wanted.insert(0, ("draft model", head.draft_size))
    for part, (whose, size) in zip(parts, wanted, strict=True):
        if part.shape[-1] != size:
            raise ShapeError(
                f"The judge {head.name!r} was trained on states of {size} numbers of its {whose}, and this {whose} "
                f"gives {part.shape[-1]}. Use the pair that the judge was trained for."
            )
    return torch.cat(parts, dim=-1)


def make_judge(part: str, options: RuleOptions) -> Judge:
    """The rule by name, "judge(threshold=q0.2, veto=0)", with the head of the options.

    Raises ConfigError where there is no head or an option is out of range."""
    fields: Any = Judge
    own = {option.name: option for option in dataclasses.fields(fields) if option.name != "head"}
    given = parse_options(part.strip()[len(NAME) :].strip(), NAME, own)
    if options.judge is None:
        raise ConfigError(
            "Rule 'judge' needs a trained head: --judge with its folder, or RuleOptions(judge=load_judge(folder)); "
            "one is made by `dropmatch train judge`."
        )
    return Judge(options.judge, **given)  # type: ignore[arg-type]  # checked as they were read
