"""Why an emitted token was kept. A leaf."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Codes held in int8 tensors; 0 is a rejection.

    EXACT: the target's own token. RATIO: the rejection-sampling test of lossless decoding at temperature > 0.
    JS: Eq. 6. MAJORITY: Eq. 7. HEAD: Eq. 4. BONUS: after a fully kept draft. RECOVERED: after a rejection.
    """

    REJECTED = 0
    EXACT = 1
    RATIO = 2
    JS = 3
    MAJORITY = 4
    HEAD = 5
    BONUS = 6
    RECOVERED = 7

    @property
    def label(self) -> str:
        """The name in outputs, such as "js"."""
        return self.name.lower()
