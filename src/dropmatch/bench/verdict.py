"""What `dropmatch tune` found, in words. Pure functions over its results file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAME_SPEED = 0.02  # a measured difference within it is none


def verdict(result: Mapping[str, Any]) -> list[str]:
    """What is recommended, how sure that is, and what would make it surer."""
    choice = result["recommendation"]
    n = choice["checks"][0]["num_items"] if choice["checks"] else len(result["settings"]["items"])
    timing = choice["timing"]
    lines = [f"Recommended: {choice['arm']}"]
    for check in choice["checks"]:
        limit = cost(check, check["limit"])
        if check["status"] == "within":
            lines.append(f"Within the budget: {cost(check, check['worst'])} at worst, {limit} allowed ({n} prompts).")
        else:
            needed = f" About {check['needed']} prompts like these would prove it." if check["needed"] else ""
            lines.append(
                f"NOT PROVEN within the budget: {cost(check, check['value'])} measured, but up to "
                f"{cost(check, check['worst'])} cannot be ruled out on {check['num_items']} prompts; {limit} allowed. "
                f"Confidence that it holds: {check['confidence']:.0%}.{needed}"
            )
    other = choice["proven_alternative"]
    if other is not None:
        lines.append(f"Proven instead: {other['arm']}, predicted {other['predicted_over_plain']:.2f}x plain decoding.")
    if choice["faster_than_lossless"] is not None:
        lines.append(
            f"Confidence that it is faster than lossless decoding at its best length, by predicted speed: "
            f"{choice['faster_than_lossless']:.0%}."
        )
    slower = [name for name in ("plain", "lossless") if timing[f"over_{name}"]["median"] < 1.0 - _SAME_SPEED]
    if slower and choice["rule"] not in slower:
        lines.append(
            f"MEASURED SLOWER than {' and '.join(slower)} decoding, against the prediction. Repeat with more "
            "--cost-items and --cost-tokens before you use it."
        )
    lines.append(
        f"Measured in whole calls at batch 1 on {timing['items']} prompts: "
        f"{timing['over_plain']['median']:.2f}x plain, {timing['over_lossless']['median']:.2f}x lossless "
        f"(predicted, decoding only: {choice['predicted_over_plain']:.2f}x and "
        f"{choice['predicted_over_lossless']:.2f}x)."
    )
    return lines


def cost(check: Mapping[str, Any], value: float) -> str:
    """One measure of what a setting costs the answers."""
    if check["measure"] == "log-prob loss":
        return f"{value:.4f} nats of log-prob"
    if check["measure"] == "accuracy drop":
        return f"{100 * value:.1f} points of accuracy"
    return f"{value:.2%} lossy tokens"
