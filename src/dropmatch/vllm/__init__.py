"""DropMatch inside vLLM: a plugin of the group `vllm.general_plugins`, idle until --additional-config asks for it.

    vllm serve TARGET --speculative-config '{"model": DRAFT, "num_speculative_tokens": 10}' \\
        --additional-config '{"dropmatch": {"rule": "dropmatch", "k": 5, "p_drop": 0.3}}'

The only package that imports vllm. Its rules, heads and masks are those of `dropmatch.core`.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes. Only looks for the configuration; imports nothing that vLLM has not."""
    from dropmatch.vllm.install import watch

    watch()
