import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data() -> Path:
    """Folder of real text files, named by RESROUTE_DATA."""
    if not (folder := os.environ.get("RESROUTE_DATA")):
        pytest.skip("RESROUTE_DATA is not set to a folder of real text files")
    return Path(folder)


@pytest.fixture(scope="session")
def cheap_corpus(tmp_path_factory):
    """A storyworld corpus of a few dozen stories."""
    from resroute.data import prepare_storyworld

    return prepare_storyworld(tmp_path_factory.mktemp("data") / "tales", characters=30_000)
