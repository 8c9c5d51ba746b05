"""dropmatch bench vllm: stock vLLM against the plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli.runs import check_writable


def bench_vllm(
    data: Annotated[Path, typer.Option(help="Evaluation items of one turn, such as gsm8k.jsonl.")],
    target: Annotated[
        str, typer.Option(help="Target model, as vLLM takes it (hub id, local folder), or a name that fetch lists.")
    ],
    speculative_config: Annotated[
        str, typer.Option(help='vLLM\'s own JSON, such as \'{"model": DRAFT, "num_speculative_tokens": 10}\'.')
    ],
    dropmatch: Annotated[
        list[str],
        typer.Option(help='What stands under "dropmatch" in --additional-config, as JSON; repeat for more arms.'),
    ] = ['{"rule": "dropmatch", "k": 5, "p_drop": 0.3}'],  # noqa: B006  # typer reads it only
    engine: Annotated[
        str, typer.Option(help="Further arguments of vllm.LLM as JSON, such as '{\"max_model_len\": 2048}'.")
    ] = "{}",
    output: Annotated[Path, typer.Option(help="Results file.")] = Path("results/bench_vllm.json"),
    num_items: Annotated[int, typer.Option(min=1, help="Items from the file.")] = 32,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens; left out: each task's own.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes over all prompts.")] = 1,
) -> None:
    """Stock vLLM, DropMatch inside vLLM and, where the version has it, vLLM's own lossy rule, on the same prompts."""
    from dropmatch.bench.tasks import load_items
    from dropmatch.bench.vllm import parse_object, print_table, run_vllm

    speculative = parse_object(speculative_config, "--speculative-config")
    settings = [parse_object(given, "--dropmatch") for given in dropmatch]
    arguments = parse_object(engine, "--engine")
    check_writable(output)
    result = run_vllm(
        load_items(data, num_items),
        target=target,
        speculative=speculative,
        dropmatch=settings,
        engine=arguments,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        output=output,
    )
    print_table(result)
    print(json.dumps({"output": str(output), "summary": result["summary"]}))
