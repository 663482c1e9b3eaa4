"""A description as lines of text, most useful first."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from resroute.data.corpora import SPLITS
from resroute.data.description import RARE, Description, KindOfCharacter
from resroute.data.ngrams import NgramBaselines
from resroute.data.tokenizer import END_OF_TEXT

COLUMNS = 100

_LABEL_COLUMNS = 12
_NUM_LISTED = 100
_NUM_EXAMPLES = 3
_UNSEEN = ("control", "invisible", "odd space", "private use", "unassigned")
_NAMES = {" ": "space", "\n": "line end", "\t": "tab", "\r": "CR", END_OF_TEXT: END_OF_TEXT}

# words, or pieces between which alone a line may break
_Paragraph = str | list[str]


def render(description: Description) -> list[str]:
    """Lines of at most 100 columns that a person reads, most useful first.

    Control characters and others that do not print are escaped; wide characters take two columns.
    """
    sections: tuple[tuple[str | None, Iterable[_Paragraph]], ...] = (
        (None, [_heading(description)]),
        ("size", _size(description)),
        ("look at", _findings(description)),
        ("to beat", _baselines(description)),
        ("splits", _splits(description)),
        ("documents", _documents(description)),
        ("alphabet", _alphabet(description)),
        ("of these", [_kind(kind) for kind in description.kinds]),
        ("begins", [[_escaped(line)] for line in description.first_lines]),
    )
    lines: list[str] = []
    for label, paragraphs in sections:
        for number, paragraph in enumerate(paragraphs):
            start = label if number == 0 else ""
            lines += _filled(start, paragraph)
    return lines


def _heading(description: Description) -> _Paragraph:
    corpus = description.corpus
    kind = f"a corpus made from {_escaped(corpus.source)}" if corpus else "a text file"
    return f"{_escaped(description.name)}: {kind}"


def _size(description: Description) -> Iterator[_Paragraph]:
    sizes = [f"{_many(description.bytes, 'byte')}{'' if description.file else ' of UTF-8'}"]
    sizes.append(_many(description.characters, "character"))
    if description.tokens != description.characters:
        sizes.append(_many(description.tokens, "token"))
    has_lines = description.file or any(character == "\n" for character, _ in description.alphabet)
    if has_lines:
        sizes.append(_many(description.lines, "line"))
    yield ", ".join(sizes)
    if has_lines and description.longest_line:
        longest = _many(description.longest_line, "character")
        yield f"longest line: {longest}, line {description.longest_line_number:,}"


def _findings(description: Description) -> Iterator[_Paragraph]:
    found = [*_of_file(description), *_of_text(description)]
    yield from found or ["nothing that needs mending"]


def _of_file(description: Description) -> Iterator[str]:
    file = description.file
    if not file:
        return
    num_bad = file.bad_bytes + sum(k.count for k in description.kinds if k.kind == "control")
    if wide := file.wide_encoding:
        yield f"It starts like {wide}: convert it with iconv -f {wide} -t UTF-8."
    elif num_bad * 20 > description.bytes:
        yield "It looks like no text: over one byte in twenty is a control character or no UTF-8."
    if file.bad_bytes:
        verb = "is" if file.bad_bytes == 1 else "are"
        first = "at" if file.bad_bytes == 1 else "the first at"
        yield (
            f"{_many(file.bad_bytes, 'byte')} {verb} no UTF-8, {first} offset "
            f"{file.first_bad_byte:,}: convert the file with iconv, or cut them out."
        )
    if file.byte_order_mark:
        yield "A byte-order mark at the start: --clean drops it."
    if file.crlf_line_ends or file.cr_line_ends:
        kinds = {"CRLF": file.crlf_line_ends, "CR alone": file.cr_line_ends}
        what = " and ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
        yield f"Line ends: {what}; --clean turns them into LF."
    if file.nul_bytes:
        yield f"{_many(file.nul_bytes, 'NUL byte')}: --clean drops NUL bytes."


def _of_text(description: Description) -> Iterator[str]:
    if not any(character.strip() for character, _ in description.alphabet):
        yield "There is no text but white space in it." if description.bytes else "It is empty."
    if description.misread:
        verb = "looks" if description.misread == 1 else "look"
        examples = ", ".join(
            f"{_cut(_escaped(run), 20)} {_times(count)}"
            for run, count in description.misread_examples[:_NUM_EXAMPLES]
        )
        yield (
            f"{_many(description.misread, 'place')} {verb} wrongly decoded ({examples}): "
            "take the text from its source anew, or mend it with ftfy."
        )
    for kind in description.kinds:
        if kind.kind == "lost in decoding":
            yield f"{_many(kind.count, 'character')} lost in an earlier decoding (U+FFFD)."
    unseen = [kind for kind in description.kinds if kind.kind in _UNSEEN]
    if unseen:
        listed = ", ".join(f"{kind.kind} {kind.count:,}" for kind in unseen)
        yield f"Characters that the eye may miss: {listed} (see below)."
    documents = description.documents
    if documents.copies:
        verb = "is a copy" if documents.copies == 1 else "are copies"
        yield f"{_many(documents.copies, 'document')} {verb} of an earlier one."
    if documents.empty:
        verb = "is" if documents.empty == 1 else "are"
        yield f"{_many(documents.empty, 'document')} {verb} empty."
    for mark, count in documents.other_marks.items():
        yield f"{mark} occurs {_times(count)}; only {END_OF_TEXT} ends a document."


def _baselines(description: Description) -> Iterator[_Paragraph]:
    corpus = description.corpus
    if not corpus:
        return
    if ngrams := corpus.ngrams:
        yield f"n-gram models, nats per {ngrams.unit} of the validation split:"
        yield [f"{order}: {nats:.4f} " for order, nats in enumerate(ngrams.nats, start=1)]
        yield f"(Witten-Bell smoothing; {_extent(ngrams)})"
    if corpus.floor is not None:
        yield f"The generator itself loses {corpus.floor:.4f}; no model is better on average."


def _extent(ngrams: NgramBaselines) -> str:
    parts = []
    for what, used, total in (
        ("trained on", ngrams.train_tokens, ngrams.train_total),
        ("measured on", ngrams.val_tokens, ngrams.val_total),
    ):
        start = f"the first {used:,} of " if used < total else ""
        parts.append(f"{what} {start}{_many(total, ngrams.unit)}")
    return ", ".join(parts)


def _splits(description: Description) -> Iterator[_Paragraph]:
    if corpus := description.corpus:
        for split in SPLITS:
            tokens = _many(corpus.split_tokens[split], "token")
            yield f"{split}: {tokens} in {_many(corpus.split_documents[split], 'document')}"


def _documents(description: Description) -> Iterator[_Paragraph]:
    documents = description.documents
    names = {"endoftext": f"the mark {END_OF_TEXT}", "blank-line": "blank lines"}
    if documents.separator == "none":
        yield "nothing separates documents"
        return
    name, corpus = names[documents.separator], description.corpus
    in_text = sum(corpus.split_documents.values()) if corpus else documents.count
    if in_text == documents.count:
        yield f"{in_text:,}, told apart by {name}"
    else:
        yield f"{in_text:,} in the text, told apart by {name}; {documents.count:,} in the tokens"
    if lengths := documents.lengths:
        yield (
            f"length: {lengths.shortest:,} to {_many(lengths.longest, 'character')}, mean "
            f"{lengths.mean:,.1f}; 10 / 50 / 90 % up to {lengths.tenth:,} / {lengths.median:,} / "
            f"{lengths.ninetieth:,}"
        )
    if documents.examined < documents.count:
        yield f"(lengths and copies of the first {documents.examined:,})"
    for separator, count in documents.separators.items():
        if separator != documents.separator:
            yield f"{names[separator]} would make {_many(count, 'document')}"


def _alphabet(description: Description) -> Iterator[_Paragraph]:
    alphabet = description.alphabet
    rare = description.rare
    verb = "occurs" if len(rare) == 1 else "occur"
    few = f"; {len(rare):,} of them {verb} {RARE} times or less" if rare else ""
    num_characters = len(alphabet) - any(symbol == END_OF_TEXT for symbol, _ in alphabet)
    mark = f" and {END_OF_TEXT}" if num_characters < len(alphabet) else ""
    yield f"{_many(num_characters, 'distinct character')}{mark}{few}"
    if len(alphabet) <= _NUM_LISTED:
        yield _table(alphabet)
        return
    shown = _NUM_LISTED // 2
    yield _table(alphabet[:shown])
    yield f"... and {len(alphabet) - shown:,} more"
    if rarest := [item for item in rare[-shown:] if item not in alphabet[:shown]]:
        yield "the rarest:"
        yield _table(rarest)


def _table(counts: Sequence[tuple[str, int]]) -> _Paragraph:
    """Characters and their counts, padded so that they stand in columns."""
    cells = [f"{_symbol(character)} {count:,}" for character, count in counts]
    # the few long ones take two cells
    width = 2 + sorted(map(_columns, cells))[9 * (len(cells) - 1) // 10] if cells else 1
    room = [width * -(-(_columns(cell) + 2) // width) - 1 for cell in cells]
    return [cell + " " * (size - _columns(cell)) for cell, size in zip(cells, room, strict=True)]


def _kind(kind: KindOfCharacter) -> _Paragraph:
    shown = ", ".join(_named(character) for character in kind.characters[:_NUM_EXAMPLES])
    more = len(kind.characters) - _NUM_EXAMPLES
    rest = f" and {more:,} more" if more > 0 else ""
    return f"{kind.kind}: {_times(kind.count)}, {shown}{rest}"


def _many(count: int, unit: str) -> str:
    return f"{count:,} {unit}" + ("" if count == 1 else "s")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _symbol(character: str) -> str:
    """A character in a list: itself where it shows, else its name or number."""
    if name := _NAMES.get(character):
        return name
    is_alone = unicodedata.category(character)[0] not in "MC" and character.isprintable()
    # letters that run from right to left would turn the line around
    is_left_to_right = unicodedata.bidirectional(character) not in ("R", "AL")
    return character if is_alone and is_left_to_right else f"U+{ord(character):04X}"


def _named(character: str) -> str:
    name = unicodedata.name(character, "")
    return f"U+{ord(character):04X}" + (f" ({name.lower()})" if name else "")


def _escaped(text: str) -> str:
    """A text with what does not print as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _columns(text: str) -> int:
    """Columns of a terminal that a text takes at most."""
    return len(text) + sum(unicodedata.east_asian_width(character) in "WF" for character in text)


def _cut(text: str, columns: int) -> str:
    """A text cut to so many columns, its end then three dots."""
    if _columns(text) <= columns:
        return text
    while _columns(text) > columns - 3:
        text = text[:-1]
    return text + "..."


def _filled(label: str | None, paragraph: _Paragraph) -> Iterator[str]:
    """Lines with as many words or pieces each as fit, beside a label where there is one."""
    margin = 0 if label is None else _LABEL_COLUMNS
    line = (label or "").ljust(margin)
    is_empty = True
    for piece in paragraph.split(" ") if isinstance(paragraph, str) else paragraph:
        piece = _cut(piece, COLUMNS - margin)
        if not is_empty and _columns(line) + 1 + _columns(piece.rstrip()) > COLUMNS:
            yield line.rstrip()
            line, is_empty = " " * margin, True
        line += piece if is_empty else f" {piece}"
        is_empty = False
    yield line.rstrip()
