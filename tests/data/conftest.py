"""A real tokenizer, small enough to be made on the spot."""

import pytest

from jobs.tiny_model.tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer([f"State the answer: {i} + {i + 1} =" for i in range(100)], max_length=512)
