"""Conversations about documents: the same from the same seed, the document whole but for one line in it."""

from __future__ import annotations

import random
import re

import pytest

from moetier_bench.corpus import conversation

NOTE = re.compile(r"\nNote: the secret passphrase is (\S+-\d\d)\.\n")


@pytest.mark.parametrize(
    "document", ["", "one line", "first\nsecond\nthird", "\n\n", "ends\n", "\ufffd\n\ufffd"], ids=repr
)
def test_a_document_has_one_passphrase_in_it_and_is_whole(document: str) -> None:
    for seed in range(20):
        first, *further = conversation(document, random.Random(seed))
        (passphrase,) = NOTE.findall(first["content"])
        assert NOTE.sub("", first["content"], count=1).startswith(f"{document}\n\nWhat is the secret passphrase")
        assert [message["role"] for message in further] in ([], ["assistant", "user"])
        assert not further or further[0]["content"] == passphrase


def test_one_seed_asks_the_same_whatever_the_documents_length_is() -> None:
    draws = [random.Random(7), random.Random(7)]
    asked = [
        [conversation(text * 90, draw)[1:] for _ in range(9)] for text, draw in zip(("ab\n", "c\n"), draws, strict=True)
    ]
    assert asked[0] == asked[1]
    assert len({str(further) for further in asked[0]}) > 3
