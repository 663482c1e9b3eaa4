import pytest

from resroute.data.sources import corpus_of

TEXT = "one fine day a fox ran by. " * 40


def test_a_text_is_prepared_once_and_an_edited_one_anew(tmp_path):
    text, root = tmp_path / "tale.txt", tmp_path / "data"
    text.write_text(TEXT)
    first = corpus_of(str(text), root=root)
    assert first.path.parent == root
    assert first.path.name.startswith("tale-")
    stamp = (first.path / "meta.json").stat().st_mtime_ns
    assert corpus_of(str(text), root=root).path == first.path
    assert (first.path / "meta.json").stat().st_mtime_ns == stamp
    text.write_text(TEXT + "the end.")
    assert corpus_of(str(text), root=root).path != first.path
    assert len(list(root.iterdir())) == 2


def test_a_folder_or_the_name_of_one_below_the_root(tmp_path):
    text, root = tmp_path / "tale.txt", tmp_path / "data"
    text.write_text(TEXT)
    made = corpus_of(str(text), root=root)
    assert corpus_of(str(made.path), root=root).fingerprint == made.fingerprint
    assert corpus_of(made.path.name, root=root).fingerprint == made.fingerprint


def test_cleaning_makes_a_corpus_of_its_own(tmp_path):
    text, root = tmp_path / "tale.txt", tmp_path / "data"
    text.write_bytes(TEXT.replace(". ", ".\r\n").encode())
    with pytest.raises(ValueError, match="--clean"):
        corpus_of(str(text), root=root)
    cleaned = corpus_of(str(text), root=root, clean=True)
    assert cleaned.path.name.endswith("-clean")
    assert "\r" not in cleaned.tokenizer.symbols


def test_nothing_of_that_name(tmp_path):
    with pytest.raises(ValueError, match="nothing"):
        corpus_of(str(tmp_path / "nothing"), root=tmp_path)
