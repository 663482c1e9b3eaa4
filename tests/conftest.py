import contextlib
import os
from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as environment, contextlib.suppress(ImportError):
    # triton reads it as it is imported, which torch may do before the kernels' tests can
    if not torch.cuda.is_available():
        environment.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401


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


def pytest_addoption(parser):
    parser.addoption(
        "--backend", default="auto", help="ops backend of tests that do not name one themselves"
    )


@pytest.fixture(autouse=True)
def backend(request):
    """Run each test on the backend that was asked for, and leave the choice as it was."""
    from resroute import ops

    with ops.backend(request.config.getoption("--backend")):
        yield
