"""Number formats and the record: what the bytes mean. No I/O, no arithmetic of the layer."""

from moetier.contract.e2m1 import E2M1_INTEGERS, E2M1_VALUES, unpack_codes
from moetier.contract.e8m0 import E8M0_NAN, e8m0_to_float
from moetier.contract.geometry import BLOCK, Family, LayerGeometry
from moetier.contract.record import ExpertMatrices, Matrix, RecordLayout

__all__ = [
    "BLOCK",
    "E2M1_INTEGERS",
    "E2M1_VALUES",
    "E8M0_NAN",
    "ExpertMatrices",
    "Family",
    "LayerGeometry",
    "Matrix",
    "RecordLayout",
    "e8m0_to_float",
    "unpack_codes",
]
