"""From a Wikipedia XML dump to text8's 27 symbols, the letters a to z and the space.

Our own writing of the clean-up that Matt Mahoney describes on his page about the test data text8
("About the Test Data", mattmahoney.net/dc/textdata): of a dump of 2006 it makes the text whose
first 100,000,000 characters are text8. Where its rules are rough, so are these, for the sake of
equal text: a lone `&` takes everything up to the next `;` with it, nested tables leave their outer
parts, and an article that says `#redirect` anywhere is left out.
"""

import re
from collections.abc import Callable, Iterable, Iterator

_OPENING = re.compile(rb"<text(?=[\s/>])[^<>]*>")
_CLOSING = b"</text>"
# what may be the start of an opening tag when a block ends
_UNFINISHED = re.compile(rb"<(?:t(?:e(?:x(?:t(?:[\s/][^<>]*)?)?)?)?)?\Z")
_REDIRECT = re.compile(rb"(?i)#redirect")

_DIGITS = (b"zero", b"one", b"two", b"three", b"four", b"five", b"six", b"seven", b"eight", b"nine")
# letters become small, digits stay, anything else is white space
_SYMBOLS = bytes(
    byte if chr(byte) in "0123456789abcdefghijklmnopqrstuvwxyz" else ord(" ")
    for byte in bytes(range(256)).lower()
)

_Rule = Callable[[bytes], bytes]


def clean_wikipedia(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Turn a dump into words of the letters a to z.

    The text of each article that is no redirect is kept: without references, tags, comments,
    tables and templates; links, addresses, images and categories by their visible words; digits
    spelled out one by one; all in small letters, with one space for whatever lies between. Titles
    and other fields of the dump are dropped. Memory is that of the longest article.

    Args:
        blocks: The dump's bytes, cut anywhere.

    Yields:
        One article's words each, with a space before every word and none at the end, as in text8;
        articles without words are left out.
    """
    for article in _articles(blocks):
        if words := clean_article(article):
            yield words


def clean_article(text: bytes) -> bytes:
    """Words of one article, as `clean_wikipedia` yields them; empty for a redirect.

    Args:
        text: What stands between `<text ...>` and `</text>`, XML entities and all.
    """
    if _REDIRECT.search(text):
        return b""
    for rule in _RULES:
        text = rule(text)
    text = text.translate(_SYMBOLS)
    for digit, word in enumerate(_DIGITS):
        text = text.replace(b"%d" % digit, b" %b " % word)
    return b"".join([b" " + word for word in text.split()])


def _articles(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """What stands inside text elements; the last one may be cut off by the end of the dump."""
    held = bytearray()
    is_inside = False
    searched = 0
    for block in blocks:
        held += block
        while True:
            if is_inside:
                # the tag may have begun in the block before
                end = held.find(_CLOSING, max(0, searched - len(_CLOSING) + 1))
                searched = len(held)
                if end < 0:
                    break
                yield bytes(held[:end])
                del held[: end + len(_CLOSING)]
                is_inside = False
            else:
                tag = _OPENING.search(held)
                if not tag:
                    rest = _UNFINISHED.search(held, max(0, held.rfind(b"<")))
                    del held[: rest.start() if rest else len(held)]
                    break
                is_inside = not tag[0].endswith(b"/>")
                end = tag.end()
                # a bytearray with a match on it cannot shrink
                del tag
                del held[:end]
                searched = 0
    if is_inside:
        yield bytes(held)


def _replace(old: bytes, new: bytes) -> _Rule:
    return lambda text: text.replace(old, new)


def _substitute(pattern: bytes, new: bytes) -> _Rule:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(new, text)


def _remove(opening: bytes, inside: bytes, closing: bytes, new: bytes = b"") -> _Rule:
    """A rule that replaces an opening, all that is not one of `inside`, and a closing.

    Where the closing is missing the text stays, and the search goes on behind it: no later opening
    on the way would have found it either. So time is linear in the text, whatever it holds.
    """
    compiled = re.compile(rb"%b[^%b]*+(%b)?" % (opening, inside, closing))

    def rule(text: bytes) -> bytes:
        return compiled.sub(lambda match: match[0] if match[1] is None else new, text)

    return rule


def _show_categories() -> _Rule:
    """Leave of a category its name, still in double brackets."""
    compiled = re.compile(rb"(?i)\[\[category:([^|\]]*+)[^\]]*+(\]\])?")

    def rule(text: bytes) -> bytes:
        return compiled.sub(
            lambda match: match[0] if match[2] is None else b"[[%b]]" % match[1], text
        )

    return rule


# in the order of the original, on which the result depends
_RULES: tuple[_Rule, ...] = (
    # the dump's own escapes, which uncover tags and entities of the article
    _replace(b"&amp;", b"&"),
    _replace(b"&lt;", b"<"),
    _replace(b"&gt;", b">"),
    # references with what they say, then all other tags and comments
    _remove(rb"<ref", rb"<", rb"</ref>"),
    _remove(rb"<", rb">", rb">"),
    # an address outside the wiki; the words after it stay
    _substitute(rb"\[http:[^\] ]*", b"["),
    # how an image is shown, then its file; the caption stays
    _substitute(rb"(?i)\|thumb", b""),
    _substitute(rb"(?i)\|left", b""),
    _substitute(rb"(?i)\|right", b""),
    _substitute(rb"(?i)\|\d+px", b""),
    _substitute(rb"(?i)\[\[image:[^\[\]]*\|", b""),
    _show_categories(),
    # the same article in other languages
    _remove(rb"\[\[[a-z\-]*:", rb"\]", rb"\]\]"),
    # where a link leads; what it shows stays
    _remove(rb"\[\[", rb"|\]", rb"\|", b"[["),
    # templates and tables
    _remove(rb"\{\{", rb"}", rb"\}\}"),
    _remove(rb"\{", rb"}", rb"\}"),
    _replace(b"[", b""),
    _replace(b"]", b""),
    # what is left of entities
    _remove(rb"&", rb";", rb";", b" "),
)
