"""From a checkpoint and the finished layer files to the manifest; and what the files of a layer are called."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from moetier import __version__
from moetier.contract import LayerGeometry, RecordLayout
from moetier.contract.requantize import Loss
from moetier.files import store_errors
from moetier.store import manifest as fmt
from moetier.store.checkpoint import Checkpoint

LOSS = ".loss"


@dataclass(frozen=True)
class LayerFiles:
    """Files of one layer. loss says what re-quantization did; only a build needs it, until store.json says the same."""

    records: Path
    sums: Path
    loss: Path


def layer_files(folder: Path, number: int) -> LayerFiles:
    """The files of the layer that has this number in the checkpoint."""
    stem = folder / f"layer-{number:05d}"
    return LayerFiles(stem.with_suffix(".records"), stem.with_suffix(".sums"), stem.with_suffix(LOSS))


def describe(
    checkpoint: Checkpoint, geometry: LayerGeometry, folder: Path, deep: bool, before: fmt.Manifest | None = None
) -> fmt.Manifest:
    """The manifest of a store whose layers lie whole in `folder`. deep: also hash the checkpoint's content.

    before: of the store of which some layers were built anew; it has what is said of the others.
    """
    return fmt.Manifest(
        contract=fmt.CONTRACT,
        layout=fmt.LAYOUT,
        slices=geometry.slices,
        geometry=fmt.GeometryEntry(
            hidden=geometry.hidden,
            intermediate=geometry.intermediate,
            experts=geometry.experts,
            top_k=geometry.top_k,
        ),
        family=fmt.FamilyEntry(
            swiglu_limit=checkpoint.family.swiglu_limit,
            route_weight_before_down=checkpoint.family.route_weight_before_down,
        ),
        checkpoint=_checkpoint(checkpoint, deep),
        record_stride=RecordLayout.of(geometry).stride,
        checksum=fmt.CHECKSUM,
        layers=tuple(_entry(checkpoint, layer, folder, before) for layer in range(len(checkpoint.moe_layers))),
        left_out=tuple(fmt.LeftOutEntry(**vars(one)) for one in checkpoint.left_out),
        tool_version=__version__,
    )


def entry_before(before: fmt.Manifest | None, number: int, files: LayerFiles) -> fmt.LayerEntry | None:
    """Return what the manifest of an earlier build says of a layer, if the layer's checksums are still those."""
    for entry in before.layers if before is not None else ():
        if entry.number == number and entry.sums_sha256 == hashlib.sha256(files.sums.read_bytes()).hexdigest():
            return entry
    return None


def _checkpoint(checkpoint: Checkpoint, deep: bool) -> fmt.CheckpointEntry:
    return fmt.CheckpointEntry(
        identity=checkpoint.identity(),
        headers=checkpoint.headers,
        content=checkpoint.identity(deep=True) if deep else None,
        model_type=checkpoint.model_type,
        source_format=checkpoint.source_format,
        requantized=checkpoint.requantized,
    )


def _entry(checkpoint: Checkpoint, layer: int, folder: Path, before: fmt.Manifest | None) -> fmt.LayerEntry:
    moe, source = checkpoint.moe_layers[layer], checkpoint.sources[layer]
    files = layer_files(folder, moe.number)
    if (same := entry_before(before, moe.number, files)) is not None:
        return same
    loss = None
    with store_errors(f"{files.sums} cannot be read"):
        sums = files.sums.read_bytes()
        if source.requantized:
            total = Loss(**json.loads(files.loss.read_bytes()))
            loss = fmt.LossEntry(
                relative_rms=total.relative_rms, sign_bias=total.sign_bias, saturated_share=total.saturated_share
            )
    return fmt.LayerEntry(
        number=moe.number,
        name=moe.name,
        source=source.format,
        records=files.records.name,
        sums=files.sums.name,
        sums_sha256=hashlib.sha256(sums).hexdigest(),
        loss=loss,
    )
