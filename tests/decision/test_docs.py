"""What README and docs say of formats and refusals is what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier.decision.kinds import KINDS
from moetier.decision.rows import ROWS

ROOT = Path(__file__).parents[2]
STORE = " ".join((ROOT / "docs" / "store.md").read_text().split())
README = " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_docs_have_each_row(row):
    overridden = " (`--skip-support-check` goes on)" if row.overridable else ""
    assert f"| `{row.id}` | {row.about}{overridden} |" in STORE


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.id != "unknown"], ids=lambda kind: kind.id)
def test_the_docs_have_each_format(kind):
    read, _, unread = STORE.partition("Not read, and told by name:")
    assert kind.name in (read if kind.read else unread)


def test_the_readme_names_what_is_read():
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| checkpoints |"))
    for name in ("MXFP4", "BF16", "FP16", "FP32", "FP8", "NVFP4 (modelopt)", "symmetric INT4"):
        assert name in line
