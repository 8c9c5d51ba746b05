"""What a request, or a whole engine, did: acceptance, reasons, lossy tokens, and where the time went.

tau is the mean number of tokens a verification yields, the bonus or recovered token included, pooled over all
rounds: sum(accepted + 1) / rounds. It counts whole rounds, also where a stop cut the last one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dropmatch.core.reasons import Reason


@dataclass(frozen=True, slots=True)
class LossyToken:
    """A kept token that lossless decoding would not have kept. index: position in the generated ids;
    prob, best_prob: the target's undropped probability (temperature 1) of the token and of its own best token."""

    index: int
    token: int
    best_token: int
    prob: float
    best_prob: float
    reason: Reason


@dataclass(slots=True)
class RequestStats:
    """Counts of one request, or of many added up. drafted_at[i], accepted_at[i]: rounds in which a token was drafted,
    kept, at the i-th place of the draft."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reasons: Counter[Reason] = field(default_factory=Counter)
    lossy: list[LossyToken] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean tokens per verification, the bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else math.nan

    @property
    def accepted_per_round(self) -> float:
        return self.accepted / self.rounds if self.rounds else math.nan

    def record_round(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = drafted - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for i in range(drafted):
            self.drafted_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    def add(self, other: RequestStats) -> None:
        """Pool another request into this one."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        for mine, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            for i, count in enumerate(theirs):
                mine[i] += count
        self.reasons.update(other.reasons)
        self.lossy += other.lossy

    def to_json(self) -> dict[str, Any]:
        """Plain types for a results file."""
        kept = sum(self.reasons.values())
        return {
            "rounds": self.rounds,
            "tau": None if not self.rounds else self.tau,
            "accepted_per_round": None if not self.rounds else self.accepted_per_round,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_by_position": [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True) if d],
            "reasons": {reason.label: count for reason, count in sorted(self.reasons.items())},
            "reason_shares": {reason.label: count / kept for reason, count in sorted(self.reasons.items())},
            "lossy_tokens": len(self.lossy),
            "lossy_share": len(self.lossy) / self.emitted if self.emitted else None,
            "lossy": [
                {
                    "index": token.index,
                    "token": token.token,
                    "best_token": token.best_token,
                    "prob": token.prob,
                    "best_prob": token.best_prob,
                    "reason": token.reason.label,
                }
                for token in self.lossy
            ],
        }


@dataclass(slots=True)
class TimeSplit:
    """Seconds of wall time by part of the loop, and how often the models ran.

    prefill: both models' prompts; draft: the drafter; target: forward and plain head; judge: dropout heads and rule;
    rest: everything else. head_rows: positions at which the K dropout heads were asked.
    """

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    judge: float = 0.0
    rest: float = 0.0
    target_forwards: int = 0
    head_rows: int = 0

    def add(self, other: TimeSplit) -> None:
        """Add up two splits."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def decode(self) -> float:
        """Seconds of decoding, prefill left out."""
        return self.draft + self.target + self.judge + self.rest

    def predicted_speedup(self, tau: float) -> float:
        """Speed-up over plain decoding that this split implies: tau tokens for one step against one target forward a
        token. Takes a verifying forward to cost what a one-token forward does, which holds while weights, not
        arithmetic, set the time; compute-bound targets gain less."""
        return tau * self.target / self.decode if self.decode > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            "prefill_s": self.prefill,
            "draft_s": self.draft,
            "target_s": self.target,
            "judge_s": self.judge,
            "rest_s": self.rest,
            "decode_s": self.decode,
            "target_forwards": self.target_forwards,
            "head_rows": self.head_rows,
        }


@dataclass(slots=True)
class EngineStats:
    """All requests of an engine pooled, with the time split and the radius seen where heads were asked."""

    requests: RequestStats = field(default_factory=RequestStats)
    time: TimeSplit = field(default_factory=TimeSplit)

    def add(self, other: EngineStats) -> None:
        """Pool another run into this one."""
        self.requests.add(other.requests)
        self.time.add(other.time)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, prefill left out."""
        return self.requests.emitted / self.time.decode if self.time.decode > 0 else math.nan

    @property
    def predicted_speedup(self) -> float:
        return self.time.predicted_speedup(self.requests.tau)

    def hint(self) -> str | None:
        """Advice where speculation does not pay, by the predicted speed-up; None where it does."""
        speedup = self.predicted_speedup
        if math.isnan(speedup) or speedup >= 1.0 or self.requests.drafted == 0:
            return None
        split = self.time
        return (
            f"Speculation does not pay here: predicted {speedup:.2f}x plain decoding. Drafting took "
            f"{split.draft:.2f} s beside {split.target:.2f} s of target forwards, at tau {self.requests.tau:.2f}. "
            "Try a shorter draft length, a smaller or n-gram drafter, or plain decoding."
        )

    def to_json(self) -> dict[str, Any]:
        speedup, rate = self.predicted_speedup, self.tokens_per_second
        return {
            **self.requests.to_json(),
            "time": self.time.to_json(),
            "tokens_per_second": None if math.isnan(rate) else rate,
            "predicted_speedup": None if math.isnan(speedup) else speedup,
            "hint": self.hint(),
        }
