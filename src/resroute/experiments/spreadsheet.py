"""JSON values in the cells of CSV files, exactly, and safe to open in a spreadsheet.

Numbers, true, false, null, lists and objects stand as JSON. Text stands as it is, unless it would
read as one of these or start with a sign that a spreadsheet takes for a formula: then it has the
quotation marks of JSON. An empty cell is a value that is not there.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resroute.config import UserError
from resroute.files import read_text


def table(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> str:
    """CSV with a heading: the columns `first`, then others as they first appear."""
    columns = list(dict.fromkeys([*first, *(key for row in rows for key in row)]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row[c]) if c in row else "" for c in columns] for row in rows)
    return text.getvalue()


def read_table(
    path: Path, needed: Sequence[str], remedy: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a file that `table` has written, each after the words that name it in errors.

    Empty cells have no key.

    Raises:
        UserError: The file is missing, not such a table, or lacks a needed column.
    """
    lines = csv.reader(io.StringIO(read_text(path, remedy), newline=""), strict=True)
    columns: list[str] = []
    try:
        columns = [str(_value(cell)) for cell in next(lines, [])]
        lacking = [name for name in needed if name not in columns]
        if lacking or len(set(columns)) < len(columns):
            raise UserError(
                f"{path}: damaged (needs a heading with {', '.join(needed)}, each once); {remedy}"
            )
        for cells in lines:
            where = f"{path} line {lines.line_num}"
            if len(cells) != len(columns):
                raise UserError(
                    f"{where}: damaged ({len(cells)} cells under {len(columns)} headings); {remedy}"
                )
            named = zip(columns, cells, strict=True)
            row = {column: _value(cell) for column, cell in named if cell}
            lacking = [name for name in needed if name not in row]
            if lacking:
                raise UserError(f"{where}: damaged (no {', '.join(lacking)}); {remedy}")
            yield where, row
    except csv.Error as error:
        raise UserError(f"{path} line {lines.line_num}: damaged CSV ({error}); {remedy}") from None


def flat(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Fields of nested objects by dotted names after `prefix`."""
    found: dict[str, Any] = {}
    for key, part in value.items():
        # an empty object, or a name that has a dot itself, stays a value
        if isinstance(part, dict) and part and all(k and "." not in k for k in part):
            found |= flat(part, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = part
    return found


def nested(row: Mapping[str, Any], prefix: str, where: str, remedy: str) -> dict[str, Any]:
    """The objects whose fields `flat` has named.

    Raises:
        UserError: A name that is both a field and an object.
    """
    found: dict[str, Any] = {}
    for column, value in row.items():
        if not column.startswith(prefix):
            continue
        *parents, last = column.removeprefix(prefix).split(".")
        node = found
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UserError(f"{where}: damaged ({column} is below a value); {remedy}")
        if last in node:
            raise UserError(f"{where}: damaged ({column} stands twice); {remedy}")
        node[last] = value
    return found


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, allow_nan=False)
    return value if _is_plain(value) else json.dumps(value)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return cell


def _is_plain(text: str) -> bool:
    """Whether text is safe as it stands, and is read back as text."""
    if not text.isprintable() or not (text[:1].isalnum() or text[:1] in ("/", ".", "_")):
        return False
    return _value(text) == text and isinstance(_value(text), str)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
