"""How alike the dropout heads' whole texts are (Figure 3 of the DropMatch paper): every head answers alone, and the
answers to one prompt are compared in pairs, by the cosine of sentence embeddings and by entailment both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from dropmatch.api import Decoder
from dropmatch.bench.analyses.decoding import (
    ANSWER,
    TARGET,
    DecodingSettings,
    Job,
    decode_jobs,
    fingerprint,
    say_answers_taken_over,
    target_engine,
)
from dropmatch.bench.analyses.show import console
from dropmatch.bench.analyses.single_head import Head
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.settings import NEWER, weights_of
from dropmatch.bench.tasks import Item
from dropmatch.hf.encoders import EntailmentModel, SentenceEncoder
from dropmatch.provenance import collect


def run_similarity(
    decoder: Decoder,
    items: Sequence[Item],
    *,
    rates: Sequence[float],
    encoder: SentenceEncoder,
    entailment: EntailmentModel | None,
    settings: DecodingSettings,
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Decode, compare and write the results file. Returns what was written.

    items: the first turn of each is answered. entailment: None leaves it out. An interrupt leaves a journal, from which
    the same call goes on.
    """
    provenance = collect(device=str(decoder.target.device))
    K = decoder.dropout.num_paths
    written = {
        **described,
        "rates": list(rates),
        "k": K,
        "dtype": str(decoder.target.dtype),
        **asdict(settings),
        "items": [item.id for item in items],
        "prompts": fingerprint(items),
        **weights_of(decoder),
    }
    with Journal(output, written, restart=restart, newer=NEWER) as journal:
        say_answers_taken_over(journal)
        _decode(decoder, items, [Head(path, rate) for rate in rates for path in range(K)], settings, journal)
        texts = {(e["arm"], e["item"]): e["text"] for e in journal.entries}
        tokens = {(e["arm"], e["item"]): e["tokens"] for e in journal.entries}
        rows = []
        with ProgressMeter("comparing", len(rates)) as meter:
            for rate in rates:
                arms = [Head(path, rate).name for path in range(K)]
                rows.append(
                    {
                        "p_drop": rate,
                        **similarities(arms, items, texts, encoder, entailment),
                        "same_text": _share_equal([[tokens[arm, item.id] for arm in arms] for item in items]),
                    }
                )
                meter.advance()
        result = {
            "kind": "analyze-similarity",
            "settings": {
                **written,
                "encoder_max_tokens": encoder.max_tokens,
                "texts_cut": encoder.num_cut,
                "pairs_cut": None if entailment is None else entailment.num_cut,
            },
            "similarity": rows,
            "answers": {
                arm: {item.id: texts[arm, item.id] for item in items} for arm in dict.fromkeys(a for a, _ in texts)
            },
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


def _decode(
    decoder: Decoder, items: Sequence[Item], heads: Sequence[Head], settings: DecodingSettings, journal: Journal
) -> None:
    done = {(e["arm"], e["item"]) for e in journal.found("arm", ANSWER)}
    jobs = [
        job
        for stream, item in enumerate(items)
        for job in (Job(TARGET, item, stream), *(Job(head.name, item, stream, head) for head in heads))
    ]
    with ProgressMeter("answers", len(jobs), len(done)) as meter:
        left = [job for job in jobs if (job.arm, job.item.id) not in done]
        if left:
            decode_jobs(decoder, target_engine(decoder, settings), left, settings, journal, meter)


def similarities(
    arms: Sequence[str],
    items: Sequence[Item],
    texts: Mapping[tuple[str, str], str],
    encoder: SentenceEncoder,
    entailment: EntailmentModel | None,
) -> dict[str, Any]:
    """K x K matrices, means over prompts, and each head's similarity to the target's own text.

    entailment[i][j]: share of prompts on which the texts of heads i and j entail each other."""
    K = len(arms)
    vectors = torch.stack(
        [encoder([texts[arm, item.id] for arm in (*arms, TARGET)]) for item in items]
    )  # [I, K + 1, e]
    cosine = (vectors @ vectors.transpose(-1, -2)).double().mean(0)  # [K + 1, K + 1]
    found: dict[str, Any] = {
        "cosine": cosine[:K, :K].tolist(),
        "cosine_between_heads": _off_diagonal(cosine[:K, :K]),
        "cosine_to_target": cosine[K, :K].tolist(),
        "entailment": None,
        "entailment_between_heads": None,
        "entailment_to_target": None,
    }
    if entailment is not None:
        mutual = torch.stack([_mutual([texts[arm, item.id] for arm in (*arms, TARGET)], entailment) for item in items])
        share = mutual.double().mean(0)
        found["entailment"] = share[:K, :K].tolist()
        found["entailment_between_heads"] = _off_diagonal(share[:K, :K])
        found["entailment_to_target"] = share[K, :K].tolist()
    return found


def _mutual(texts: Sequence[str], entailment: EntailmentModel) -> Tensor:
    """Which texts entail each other. Returns [T, T] bool, symmetric."""
    answers = entailment([(a, b) for a in texts for b in texts])
    one_way = torch.tensor(answers).view(len(texts), len(texts))
    return one_way & one_way.T


def _off_diagonal(matrix: Tensor) -> float | None:
    """Mean over different heads; None for a single one."""
    K = len(matrix)
    return float((matrix.sum() - matrix.diagonal().sum()) / (K * (K - 1))) if K > 1 else None


def _share_equal(groups: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of prompts to which all heads gave the same tokens."""
    return sum(all(text == texts[0] for text in texts) for texts in groups) / len(groups)


def print_similarity(result: Mapping[str, Any]) -> None:
    """One matrix a rate, entailment beside cosine where it was asked for."""
    shown = console()
    K = result["settings"]["k"]
    for row in result["similarity"]:
        for name in ("cosine", "entailment"):
            if row[name] is None:
                continue
            table = Table("", *(f"head {i + 1}" for i in range(K)), title=f"{name}, p_drop={row['p_drop']:g}")
            for i, values in enumerate(row[name]):
                table.add_row(f"head {i + 1}", *(f"{value:.3f}" for value in values))
            table.add_row("target", *(f"{value:.3f}" for value in row[f"{name}_to_target"]), end_section=True)
            shown.print(table)
    settings = result["settings"]
    shown.print(
        f"Means over {len(settings['items'])} prompts. Entailment counts where both texts entail each other. "
        f"{settings['texts_cut']} texts were cut to the encoder's {settings['encoder_max_tokens']} tokens."
    )
