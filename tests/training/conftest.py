import dataclasses

import pytest


@pytest.fixture
def replaced():
    return dataclasses.replace
