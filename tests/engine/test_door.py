"""What a layer computes from is bf16, whatever dtype the model runs in and whichever tier computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moetier.engine import TieredModel, tensors  # noqa: E402
from moetier.engine.host import TieredLayer  # noqa: E402
from moetier.settings import Settings  # noqa: E402
from moetier.store.build import build_store  # noqa: E402
from moetier.store.store import Store  # noqa: E402
from tests.store.checkpoints import write_checkpoint  # noqa: E402


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[TieredLayer]:
    write_checkpoint(tmp_path / "model", experts=8, hidden=64, intermediate=32, top_k=2)
    build_store(tmp_path / "model", tmp_path / "store")
    settings = Settings(store=tmp_path / "store", threads=1)
    with Store.open(settings.store) as store, TieredModel(settings, store, 8, 64) as model:
        yield model.attach(store.manifest.layers[0].number)


class Slots:
    """What a layer over device slots is given, computed by the same exact kernel."""

    def __init__(self, layer: TieredLayer) -> None:
        self.layer, self.dtypes = layer, set[Any]()

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        self.dtypes.add(x.dtype)
        return tensors.run_layer(self.layer, x, ids, weights)


def test_a_model_in_float32_gets_the_same_bits_from_every_tier(layer: TieredLayer) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 64, generator=generator)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), 3.4e38  # which is beyond bf16's largest number
    ids, weights = torch.randint(0, 8, (32, 2), generator=generator), torch.rand(32, 2, generator=generator)
    slots: Any = Slots(layer)
    found = tensors.run_layer(layer, x, ids, weights)
    assert found.dtype == torch.float32
    bits = found.view(torch.int32)
    assert torch.equal(bits, tensors.run_hybrid_layer(slots, x, ids, weights).view(torch.int32))
    assert slots.dtypes == {torch.bfloat16}
    assert torch.equal(bits, tensors.run_layer(layer, x.bfloat16(), ids, weights).float().view(torch.int32))
    out = np.empty((32, 64), np.uint16)
    layer.forward(x.numpy(), ids.numpy(), weights.numpy(), out)
    assert torch.equal(bits, torch.from_numpy(out).view(torch.bfloat16).float().view(torch.int32))
    assert int(bits[:3].unique().numel()) == 1, "a row with what is not finite has no numbers"
    assert not torch.equal(x[3:], x[3:].bfloat16().float()), "else nothing was rounded"
