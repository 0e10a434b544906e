"""Probes: one question to a served model each. A probe's parameters are its fields; `KINDS` has them all."""

from __future__ import annotations

from typing import Annotated, Union

from pydantic import Field

from moetier_bench.probes.answers import Coding, Mixed
from moetier_bench.probes.decode import Decode
from moetier_bench.probes.prefill import Growth, Prefill
from moetier_bench.probes.quality import Quality, Soak
from moetier_bench.probes.shared import Fairness, Prefix

KINDS = (Decode, Prefill, Growth, Coding, Mixed, Prefix, Fairness, Quality, Soak)
AnyProbe = Annotated[
    Union[Decode, Prefill, Growth, Coding, Mixed, Prefix, Fairness, Quality, Soak],  # noqa: UP007 (a type of pydantic)
    Field(discriminator="probe"),
]
