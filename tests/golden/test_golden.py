"""The golden vectors: the oracle and every instruction set reproduce bits that were recorded once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moetier.contract import Family, LayerGeometry, RecordLayout, oracle
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas
from tests.kernels.support import Layer, assert_same_bits, expected, part_of, run_forward, run_split

GOLDEN = Path(__file__).with_name("int8x.npz")
SHA256 = "9a6e2b19e37dfa6c689536fda0962a5e683c84768db22ff4af12617291969914"

FILE = np.load(GOLDEN)
CASES = {case["name"]: case for case in json.loads(str(FILE["cases"]))}


class Golden:
    """One case, read back from the file alone."""

    def __init__(self, name: str) -> None:
        case = CASES[name]
        self.geometry = LayerGeometry(**case["geometry"])
        self.family = Family(**case["family"])
        self.first_slice = case["first_slice"]
        self.slice_count = self.geometry.slices if case["slice_count"] is None else case["slice_count"]
        self.x, self.ids, self.weights, self.q, self.e, self.y, self.out = (
            FILE[f"{name}/{array}"] for array in ("x", "ids", "weights", "q", "e", "y", "out")
        )
        layout = RecordLayout.of(self.geometry)
        self.records = FILE[f"{name}/records"]
        self.layer = Layer(self.geometry, [layout.unpack(record) for record in self.records])

    @property
    def x_floats(self):
        return self.x if self.x.dtype == np.float32 else oracle.from_bf16(self.x)


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


@pytest.fixture(params=CASES)
def golden(request):
    return Golden(request.param)


def test_the_file_is_the_one_that_was_committed():
    assert hashlib.sha256(GOLDEN.read_bytes()).hexdigest() == SHA256


def test_what_the_cases_cover():
    assert len(CASES) >= 40
    families = [Family(**case["family"]) for case in CASES.values()]
    assert len({(family.swiglu_limit is None, family.route_weight_before_down) for family in families}) == 4
    geometries = [LayerGeometry(**case["geometry"]) for case in CASES.values()]
    assert {oracle.segments(geometry.hidden // 32) for geometry in geometries} == {1, 2, 4, 8}
    assert {oracle.segments(geometry.slice_intermediate // 32) for geometry in geometries} == {1, 2, 4, 8}
    assert {geometry.slices for geometry in geometries} == {1, 2, 4, 8}
    outputs = np.concatenate([FILE[f"{name}/out"].ravel() for name in CASES])
    assert {0x0000, 0x7FC0, 0x7F80} <= set(outputs.tolist())
    exponents = np.concatenate([FILE[f"{name}/e"].ravel() for name in CASES])
    assert exponents.min() == -106
    assert exponents.max() == 127


def test_records_are_packed_as_they_were(golden):
    np.testing.assert_array_equal(golden.layer.memory, golden.records)


def test_the_oracle_quantizes_as_it_did(golden):
    q, e = oracle.quantize(golden.x_floats)
    np.testing.assert_array_equal(q, golden.q)
    np.testing.assert_array_equal(e, golden.e)


def test_the_oracle_runs_an_expert_as_it_did(golden):
    first = part_of(golden.layer.experts[0], golden.geometry, golden.first_slice, golden.slice_count)
    parts = oracle.cut(first, golden.slice_count)
    y = oracle.expert_rows(parts, golden.q, golden.e, golden.weights[:, 0], golden.family)
    np.testing.assert_array_equal(np.where(np.isnan(y), np.float32(np.nan), y).view(np.uint32), golden.y)


def test_the_oracle_runs_the_layer_as_it_did(golden):
    found = expected(
        golden.layer, golden.x_floats, golden.ids, golden.weights, golden.family, golden.first_slice, golden.slice_count
    )
    assert_same_bits(found, golden.out)


@pytest.mark.parametrize("isa", available_isas())
def test_the_cpu_kernels_give_the_recorded_bits(golden, pool, isa):
    kernel = CpuExperts(
        golden.geometry,
        golden.family,
        pool,
        isa=isa,
        max_tokens=len(golden.x),
        first_slice=golden.first_slice,
        slice_count=golden.slice_count,
    )
    args = (golden.layer, golden.x, golden.ids, golden.weights)
    assert_same_bits(run_forward(kernel, *args), golden.out)
    assert_same_bits(run_split(kernel, *args, np.random.default_rng(0)), golden.out)


def test_the_generator_does_not_overwrite():
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.generate"],
        cwd=GOLDEN.parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--new-contract" in done.stderr
    assert hashlib.sha256(GOLDEN.read_bytes()).hexdigest() == SHA256
