import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data() -> Path:
    """Folder of real text files, named by RESROUTE_DATA."""
    if not (folder := os.environ.get("RESROUTE_DATA")):
        pytest.skip("RESROUTE_DATA is not set to a folder of real text files")
    return Path(folder)
