import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resroute.data.wikipedia import clean_article, clean_wikipedia

PAGE = """  <page>
    <title>{title}</title>
    <id>12</id>
    <revision>
      <comment>hidden</comment>
      <text xml:space="preserve">{text}</text>
    </revision>
  </page>
"""


def dump(*texts: str) -> bytes:
    pages = "".join(PAGE.format(title=f"Title {i}", text=text) for i, text in enumerate(texts))
    return f"<mediawiki>\n<siteinfo>Wikipedia</siteinfo>\n{pages}</mediawiki>\n".encode()


def cleaned(*blocks: bytes) -> bytes:
    return b"".join(clean_wikipedia(blocks))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # letters, digits, all else
        ("The CAT sat.", "the cat sat"),
        ("In 1984, 20%", "in one nine eight four two zero"),
        ("x2y", "x two y"),
        ("don't  stop\n\n\n-- now!", "don t stop now"),
        ("caf\u00e9 \u4e2d na\u00efve", "caf na ve"),
        (
            "'''Bold''' and ''slanted''\n== Heading ==\n* item\n----",
            "bold and slanted heading item",
        ),
        # escapes of the dump, entities of the article
        ("a &quot;b&quot; c", "a b c"),
        ("a&amp;nbsp;b &amp;mdash; c &amp;#233; d", "a b c d"),
        ("R&amp;D is fun; really", "r really"),
        ("x &amp;amp; y", "x y"),
        ("R&amp;D is fun", "r d is fun"),
        # references, tags, comments
        ("a&lt;ref&gt;see [[b]] 12&lt;/ref&gt; c", "a c"),
        ("a&lt;ref name=&quot;x&quot;&gt;see b&lt;/ref&gt; c&lt;ref name=y /&gt; d", "a c d"),
        ("a&lt;ref&gt;b&lt;br/&gt;c&lt;/ref&gt; d", "abc d"),
        ("a &lt;b&gt;bold&lt;/b&gt; &lt;math&gt;x&lt;/math&gt;&lt;br /&gt;z", "a bold xz"),
        ("a &lt;!-- not\n\nseen --&gt; b", "a b"),
        ("1 &lt; 2", "one two"),
        # addresses
        ("see [http://a.org/b?c=d the site] now", "see the site now"),
        ("see [http://a.org] now", "see now"),
        ("see http://a.org/b now", "see http a org b now"),
        ("a [http://x.y\nno end", "a end"),
        # links
        ("the [[cat]]s and [[dog (animal)|dogs]]", "the cats and dogs"),
        ("[[a|b|c]]", "b c"),
        ("[[cat]][[de:Katze]] [[zh-min-nan:x]]", "cat"),
        ("[[:Category:x]] [[User:Me]]", "user me"),
        ("[[open and | bar", "bar"),
        ("[[Category:Small cats]] [[category:Dogs|*]]", "small cats dogs"),
        # images
        ("[[Image:a.jpg|thumb|left|200px|A [[cat]] here]]", "a cat here"),
        ("[[Image:a_b.jpg|frame|The caption]]", "the caption"),
        ("[[image:a.jpg|Thumb|120PX|x]]", "x"),
        ("[[Image:a.jpg]]", "image a jpg"),
        # templates and tables
        ("a {{cite|x=1|y}} b", "a b"),
        ("a {| class=x\n|-\n| cell\n|} b", "a b"),
        ("a {{x|{{y}}|z}} b", "a z b"),
        ("a {{open [[b]]", "a open b"),
        ("a {b} c } d", "a c d"),
    ],
)
def test_each_rule(text: str, words: str) -> None:
    assert cleaned(dump(text)).decode() == "".join(f" {word}" for word in words.split())


def test_articles_follow_each_other_and_redirects_are_left_out() -> None:
    data = dump(
        "one", "#REDIRECT [[two]]", "", "== ==", "two\nthree", "a wiki #redirect somewhere", "end"
    )
    assert list(clean_wikipedia([data])) == [b" one", b" two three", b" end"]


def test_markup_does_not_reach_into_the_next_article() -> None:
    assert cleaned(dump("a {{open", "b}} c &amp;d", "e; [[f", "g | h]] i")) == (
        b" a open b c d e f g h i"
    )


def test_empty_elements_and_other_elements_with_text_in_their_names() -> None:
    data = b'<text xml:space="preserve" /><textarea>no</textarea><text\nbytes="3">yes</text>'
    assert cleaned(data) == b" yes"


def test_a_dump_that_is_cut_off_keeps_its_last_article() -> None:
    whole = dump("one two three")
    assert cleaned(whole[: whole.index(b" three")]) == b" one two"
    assert cleaned(whole[: whole.index(b"one") - 3]) == b""


PIECES = st.sampled_from([
    "<te", "xt>", "<", ">", "</tex", "a", "b ", "[[", "]]", "|", "{{", "}}", "&amp;", ";", "&lt;",
    "&gt;", "#redirect", "1", "é", "image:", "category:", "http:",
])  # fmt: skip
# each article begins and ends well, or not
ARTICLES = st.lists(
    st.tuples(
        st.sampled_from(["<text>", '<text xml:space="preserve">', "<text/>", "<text", ""]),
        st.lists(PIECES, max_size=6).map("".join),
        st.sampled_from(["</text>", "</text>", ""]),
        st.lists(PIECES, max_size=2).map("".join),
    ).map("".join),
    min_size=2,
    max_size=8,
).map("".join)


@settings(deadline=None)
@given(ARTICLES, st.lists(st.integers(0, 200), max_size=8))
def test_the_blocks_do_not_matter(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = [0, *sorted(cuts), len(data)]
    blocks = [data[start:stop] for start, stop in pairwise(bounds)]
    whole = list(clean_wikipedia([data]))
    # cuts past the end leave the last blocks empty
    assert list(clean_wikipedia(blocks)) == whole
    assert list(clean_wikipedia(data[i : i + 1] for i in range(len(data)))) == whole


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text("aZ3[]{}|<>&;:é \n", min_size=20).map(str.encode))
def test_the_output_is_words_of_27_symbols(data: bytes) -> None:
    words = clean_article(data)
    assert re.fullmatch(rb"( [a-z]+)*", words)
    # words have nothing left to clean
    assert clean_article(words) == words


def test_text8_comes_back(real_data: Path) -> None:
    text = (real_data / "text8-first-1mib.txt").read_bytes()
    assert cleaned(b"<text>", text, b"</text>") == text
    # the digits of text8 are already words
    assert set(text) == set(b" abcdefghijklmnopqrstuvwxyz")


def test_throughput() -> None:
    text = (
        "'''Cats''' are [[mammal|small]] animals{{fact}}, known since 1758.&lt;ref&gt;A [[book]] "
        "of 12&lt;/ref&gt; They [http://cats.org hunt] &quot;mice&quot; &amp;mdash; and [[sleep]] "
        "in the sun, as people have said for a long time and will say tomorrow.\n\n"
    )
    data = dump(*[text * 40] * 100)
    start = time.process_time()
    words = sum(map(len, clean_wikipedia([data])))
    speed = len(data) / (time.process_time() - start)
    assert words > 300_000
    assert speed > 5e6


@pytest.mark.parametrize(
    "piece",
    ["[", "{", "&lt;", "&amp;", "[[a:", "[[category:", "{{a}", "[[a]", "[[image:", "&lt;ref", "|1"],
)
def test_markup_that_never_ends_takes_linear_time(piece: str) -> None:
    text = piece.encode() * (200_000 // len(piece))
    start = time.process_time()
    clean_article(text)
    # quadratic time would be minutes
    assert time.process_time() - start < 2
