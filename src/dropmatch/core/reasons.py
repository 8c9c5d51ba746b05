"""Why an emitted token was kept. A leaf."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Codes held in int8 tensors; 0 is a rejection.

    EXACT: the target's own token. RATIO: the rejection-sampling test of lossless decoding at temperature > 0.
    JS: Eq. 6. MAJORITY: Eq. 7. HEAD: Eq. 4. BONUS: after a fully kept draft. RECOVERED: after a rejection.
    EXPECTED_*: Eq. 4, 6 and 7 in closed form (`core.closed_form`). JUDGE: a trained head (`core.judge`).
    The rest: kept by a rule of `core.rivals` where lossless decoding would have refused it.
    """

    REJECTED = 0
    EXACT = 1
    RATIO = 2
    JS = 3
    MAJORITY = 4
    HEAD = 5
    BONUS = 6
    RECOVERED = 7
    TYPICAL = 8
    LENIENCE = 9
    TOP_K = 10
    SGLANG = 11
    MARS = 12
    FLY = 13
    DIVERSED = 14
    FUZZY = 15
    CACTUS = 16
    TOKEN_V3 = 17
    EXPECTED_HEAD = 18
    EXPECTED_JS = 19
    EXPECTED_MAJORITY = 20
    JUDGE = 21

    @property
    def label(self) -> str:
        """The name in outputs, such as "js"."""
        return self.name.lower()
