"""Mutated checkpoints: the store is equal to what an independent decoder reads, or the checkpoint is refused."""

import pytest

from tests.store.mutations import CLASSES, RIGHT, campaign


def judge(counts, wrong, count):
    assert not wrong, "\n".join(wrong[:20])
    for kind in CLASSES:
        accepted = counts[kind, "right, equal"]
        assert accepted >= 0.25 * count / len(CLASSES) or count < 100 * len(CLASSES)
        assert counts[kind, "wrong, refused"] > 0
        assert accepted > 0
    assert RIGHT > 0.25


def test_no_mutant_becomes_another_model(tmp_path):
    judge(*campaign(1, 140, tmp_path), 140)


@pytest.mark.campaign
def test_ten_thousand_mutants(tmp_path):
    counts, wrong = campaign(17, 10_000, tmp_path)
    for key, count in sorted(counts.items()):
        print(*key, count)
    judge(counts, wrong, 10_000)
