"""Files of documents, a row or a line each, as one text.

Each document is followed by the literal `<|endoftext|>` and nothing else; its line ends stay as
they are. An empty document adds nothing. One that has the literal in it is refused, for it would
fall apart.
"""

import codecs
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resroute.config import UserError
from resroute.data.tokenizer import END_OF_TEXT
from resroute.files import parse_object

DOCUMENT_FIELDS = ("text", "story")

_LINE_BYTES = 1 << 26
_ROWS = 256
_BUFFER_BYTES = 1 << 18


def of_lines(path: Path, blocks: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    """The documents of JSON lines: the field `text`, else `story`, of the object on each line.

    Lines that are blank do not count, and a byte-order mark before the first is no part of it.

    Args:
        path: The file, for messages.
        blocks: Its bytes, cut anywhere.

    Returns:
        Each document after the words that name its line in errors.

    Raises:
        UserError: A line that is no such object, or is longer than 64 MB.
    """
    for number, line in enumerate(_lines(path, blocks), start=1):
        where = f"{path} line {number}"
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield where, _document(line, where)


def of_rows(
    path: Path, start: int, stop: int | None, report: Callable[[int, int], None]
) -> Iterator[tuple[str, str]]:
    """The documents of a .parquet file: its column `text`, else `story`.

    Args:
        path: The file.
        start: The first row that is wanted; row groups before it are not read.
        stop: The first row that is not; None is the end.
        report: Called with the rows behind and the rows that are wanted.

    Returns:
        Each document after the words that name its row, counted from 1, in errors.

    Raises:
        UserError: pyarrow is missing, the file is damaged, or it has no such column of text.
    """
    with _open_table(path) as table:
        column = _text_column(path, table)
        stop = table.metadata.num_rows if stop is None else stop
        row = 0
        for group in range(table.num_row_groups):
            after = row + table.metadata.row_group(group).num_rows
            if row < stop and after > start:
                batches = table.iter_batches(
                    batch_size=_ROWS, row_groups=[group], columns=[column], use_threads=False
                )
                for batch in batches:
                    for text in _values(batch.column(0), path, row):
                        row += 1
                        if start < row <= stop:
                            yield f"{path} row {row}", text or ""
                    report(min(row, stop) - start, stop - start)
            row = after


def count_rows(path: Path) -> int:
    """How many documents a .parquet file has.

    Raises:
        UserError: pyarrow is missing, or the file is damaged.
    """
    with _open_table(path) as table:
        return int(table.metadata.num_rows)


def ended(documents: Iterator[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    """Documents as one text, each followed by the end of text.

    Args:
        documents: Each after the words that name it in errors.

    Returns:
        Likewise.

    Raises:
        UserError: A document that has the end of text in it, or half a character.
    """
    end = END_OF_TEXT.encode()
    for where, text in documents:
        if END_OF_TEXT in text:
            raise UserError(
                f"{where}: has {END_OF_TEXT} inside a document; split it there, or remove it"
            )
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: has half a character (a lone surrogate) at place {error.start} of the "
                "document; mend or remove it"
            ) from None
        if data:
            yield where, data + end


def import_extra(name: str, what: str) -> Any:
    """A module of the extra `data`; `what` needs it.

    Raises:
        UserError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(
            f'{what} needs the package {package}: pip install "resroute[data]"'
        ) from None


def damaged(path: Path, kind: str, error: Exception) -> UserError:
    """One line for what a reader of files says of one that it cannot read."""
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{path}: cannot be read ({error.strerror})")
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return UserError(f"{path}: damaged or cut off ({kind}: {reason}); get the file again")


def _values(column: Any, path: Path, before: int) -> list[str | None]:
    """The texts of a column, after so many rows of the table."""
    try:
        values: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        # a table may hold any bytes as text
        values = []
        for cell in column:
            try:
                values.append(cell.as_py())
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} row {before + len(values) + 1}: not UTF-8 at byte {error.start}; "
                    "mend or remove the row"
                ) from None
    return values


def _document(line: bytes, where: str) -> str:
    remedy = "mend or remove the line"
    try:
        record = parse_object(line.decode("utf-8"), where, remedy)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}; {remedy}") from None
    field = next((name for name in DOCUMENT_FIELDS if name in record), None)
    if field is None:
        raise UserError(f"{where}: has no field text or story; {remedy}")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: its field {field} is no text; {remedy}")
    return text


def _lines(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    length = number = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        held.append(first)
        length += len(first)
        if length > _LINE_BYTES:
            raise UserError(
                f"{path} line {number + 1}: is longer than {_LINE_BYTES:,} bytes; "
                "put one document on a line"
            )
        if others:
            yield b"".join(held)
            yield from others[:-1]
            number += len(others)
            held, length = others[-1:], len(others[-1])
    yield b"".join(held)


@contextmanager
def _open_table(path: Path) -> Iterator[Any]:
    parquet = import_extra("pyarrow.parquet", "reading .parquet")
    arrow = import_extra("pyarrow", "reading .parquet")
    try:
        # as it opens by itself, a row group's whole column would be read at once
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            yield table
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(path, "parquet", error) from None


def _text_column(path: Path, table: Any) -> str:
    types = import_extra("pyarrow", "reading .parquet").types
    schema = table.schema_arrow
    column = next((name for name in DOCUMENT_FIELDS if name in schema.names), None)
    if column is None:
        listed = ", ".join(schema.names[:8])
        raise UserError(f"{path}: has no column text or story, only {listed}; name another file")
    if schema.names.count(column) > 1:
        raise UserError(f"{path}: has several columns {column}; keep one of them")
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(f"{path}: its column {column} is no text ({kind}); name another file")
    return column
