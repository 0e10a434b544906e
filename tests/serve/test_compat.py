"""What we change in vLLM, by itself; tests/serve/test_endpoints.py has it in a server."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from moetier.vllm.compat import seeds_rest


def drawn(generator: torch.Generator, number: int) -> list[int]:
    return torch.randint(0, 2**31, (number,), generator=generator).tolist()


@pytest.mark.parametrize("fails", [False, True], ids=["sampled", "failed"])
def test_a_generator_rests_while_its_requests_token_is_thrown_away(fails: bool) -> None:
    """Row 1 has no seed, row 2 gets its token, row 3 is not of this step."""
    seeds = {0: 7, 2: 8, 3: 9}
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    batch = SimpleNamespace(num_reqs=3, generators=dict(generators))
    runner = SimpleNamespace(
        input_batch=batch, discard_request_mask=SimpleNamespace(np=np.array([True, True, False, True]))
    )
    try:
        with seeds_rest(runner):
            assert set(batch.generators) == {2, 3}
            drawn(batch.generators[2], 1)
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert batch.generators == generators
    fresh = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    drawn(fresh[2], 1)
    assert {row: drawn(generator, 3) for row, generator in generators.items()} == {
        row: drawn(generator, 3) for row, generator in fresh.items()
    }
