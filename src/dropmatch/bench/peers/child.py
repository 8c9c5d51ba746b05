"""A peer at work, in its own process and environment. Run as a script; imports nothing of dropmatch.

    python child.py PEER

One JSON object a line. Requests come on standard input, answers go to what was standard output when the process began;
whatever the peer prints goes to standard error.

    {"target", "draft", "dtype", "device", "threads"}  ->  {"versions": {package: version}}
    {"ids": [...], "max_new_tokens": n, "length": L}   ->  {"tokens": [...]}

length: drafted tokens a round, null for what the peer does by default. Each peer generates exactly n tokens, greedily,
EOS ignored. A request that fails is answered {"error": "..."}, and the process ends.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Run = Callable[[Any, int, "int | None"], Any]
"""(ids [1, S], number of new tokens, draft length) -> new ids, a tensor of at least that many."""


def economize(settings: dict[str, Any]) -> Run:
    """economize's draft_model technique. Its cycle of N tokens drafts N - 1."""
    import economize
    from economize.techniques.draft_model import DraftModelConfig

    model = economize.apply(_load(settings, "target"), DraftModelConfig(model=settings["draft"]))

    def run(ids: Any, num_new: int, length: int | None) -> Any:
        decoding = None if length is None else economize.DecodeConfig(cycle_length=length + 1)
        return model.decode(ids[0], num_new, decoding=decoding).tokens

    return run


def flashspec(settings: dict[str, Any]) -> Run:
    """flashspec with one draft model: its adaptive default, or a constant draft length."""
    import torch
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    target = TargetModel(settings["target"], device, dtype, model=_load(settings, "target"))
    drafter = HuggingFaceDrafter(settings["draft"], device, dtype, model=_load(settings, "draft"))
    engines: dict[int | None, Any] = {}

    def run(ids: Any, num_new: int, length: int | None) -> Any:
        if length not in engines:
            common = {"device": settings["device"], "dtype": settings["dtype"]}
            if length is None:
                config = FlashSpecConfig(**common, sampling=SamplingConfig(temperature=0.0))
            else:
                config = FlashSpecConfig(
                    **common,
                    drafter_strategy="bandit",
                    bandit=BanditConfig(n_arms=1),
                    sampling=SamplingConfig(temperature=0.0, gamma=length),
                )
            engines[length] = SpeculativeEngine(config, [drafter], target)
        result = engines[length].generate(ids, max_new_tokens=num_new)
        return result.output_ids[0, : result.n_tokens_generated]

    return run


PEERS: dict[str, Callable[[dict[str, Any]], Run]] = {"economize": economize, "flashspec": flashspec}


def _load(settings: dict[str, Any], which: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings[which], dtype=getattr(torch, settings["dtype"]))
    return model.to(settings["device"]).eval()


def _serve(peer: str, answer: Callable[[dict[str, Any]], None]) -> None:
    import torch

    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    run = PEERS[peer](settings)
    device = torch.device(settings["device"])
    answer({"versions": {name: importlib.metadata.version(name) for name in (peer, "torch", "transformers")}})
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["ids"]], device=device)
        answer({"tokens": run(ids, request["max_new_tokens"], request["length"]).tolist()})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        _serve(sys.argv[1], answer)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
