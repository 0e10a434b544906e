"""The most tokens that a step takes, 8,192, in one call: spread over all experts, and all to one."""

import numpy as np
import pytest

from moetier.contract import Family, LayerGeometry
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas
from tests.kernels.support import expected, make_inputs, make_layer

TOKENS = 8192
GEOMETRY = LayerGeometry(hidden=64, intermediate=32, experts=5, top_k=2)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("spread", ["all-experts", "one-expert"])
def test_bits_of_8192_tokens(isa: str, spread: str) -> None:
    rng = np.random.default_rng(11)
    layer = make_layer(rng, GEOMETRY)
    x, ids, weights = make_inputs(rng, GEOMETRY, TOKENS)
    if spread == "one-expert":
        ids[:] = [3, -1]
    out = np.empty((TOKENS, GEOMETRY.hidden), np.uint16)
    CpuExperts(GEOMETRY, Family(), ThreadPool(2), isa=isa).forward(x, ids, weights, layer.addresses, out)
    assert np.array_equal(out, expected(layer, x, ids, weights, Family()))
