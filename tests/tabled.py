"""Tables in Markdown, read back."""

from __future__ import annotations

Table = list[list[str]]


def tables(text: str) -> list[Table]:
    """Every table of a text as rows of cells, the title row first and the rule under it left out."""
    found: list[Table] = []
    is_inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line[1:-1].split("|")]
            if not is_inside:
                found.append([])
            if not set(line) <= set("|-: "):
                found[-1].append(cells)
        is_inside = line.startswith("|")
    for rows in found:
        assert {len(row) for row in rows} == {len(rows[0])}, "rows differ in length"
    return found


def column(table: Table, title: str) -> list[str]:
    """The cells below a title."""
    return [row[table[0].index(title)] for row in table[1:]]
