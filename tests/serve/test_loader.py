"""The loader reads a tensor where the checkpoint's index has it, and no expert at all."""

import numpy as np
import pytest

from tests.store.mutants import bf16, made

pytest.importorskip("vllm", reason="vLLM is not installed")


def test_a_copy_that_the_index_does_not_place_is_not_loaded(tmp_path):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from moetier.vllm.loader import MoetierLoader

    m = made(np.random.default_rng(0), "bf16")
    m.spread(3)
    dense = {name for name in m.tensors if ".experts." not in name}
    for file, tensors in m.files.items():
        for name in sorted(dense):
            if m.index[name] != file:
                tensors[name] = bf16(np.full(m.tensors[name][1], 7))[0]
    m.write(tmp_path / "c")
    loader = MoetierLoader(LoadConfig(load_format="moetier"))
    source = DefaultModelLoader.Source(str(tmp_path / "c"), revision=None)
    loaded = list(loader._get_weights_iterator(source))
    assert sorted(name for name, _ in loaded) == sorted(dense)
    assert all((tensor == 1).all() for _, tensor in loaded)
    assert loader.report.expert_tensors_skipped == len(m.experts())
