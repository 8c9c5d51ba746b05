"""Markdown tables in README and docs, written from results files so that no number is typed by hand.

    python -m dropmatch.bench.tables README.md docs/results.md

A table stands between `<!-- results:begin FILE -->` and `<!-- results:end -->`, FILE being a results file relative to
the folder of the repository. A form of the table may follow, and several files where a form takes them:
`<!-- results:begin results/a.json results/b.json paper-6 -->`. Reads JSON only; one module a family of tables, and the
DropMatch paper's numbers in published.py.
"""

from dropmatch.bench.tables.documents import main, render, table

__all__ = ["main", "render", "table"]
