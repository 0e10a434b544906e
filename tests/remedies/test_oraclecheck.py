"""A build whose kernels are all wrong alike, and one without the flags that made it so."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.contract import Family, LayerGeometry, oracle
from moetier.identity.oracle import check_against_oracle
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas
from tests.kernels.test_compiler_flags import compiles
from tests.remedies.trouble import Trouble

KIND = LayerGeometry(96, 64, 4, 2), Family()


@pytest.mark.remedy("identity/oracle.py", "unset CXXFLAGS CFLAGS LDFLAGS")
def test_kernels_built_with_flags_that_change_values(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if NaN could not be, as -ffast-math has it where nothing refuses it; without such flags it compiles."""
    right, pool = CpuExperts.try_forward, ThreadPool(1)

    def wrong(self: CpuExperts, x: Any, ids: Any, weights: Any, addresses: Any, out: Any) -> Any:
        result = right(self, x, ids, weights, addresses, out)
        out[out == oracle.BF16_NAN] = 0
        return result

    monkeypatch.setattr(CpuExperts, "try_forward", wrong)
    with trouble:
        check_against_oracle(*KIND, available_isas(), pool)
    monkeypatch.undo()
    assert compiles("-ffast-math").returncode
    assert compiles("-O3").returncode == 0
    check_against_oracle(*KIND, available_isas(), pool)
    pool.close()
    trouble.gone()
