"""`moetier serve --explain`: what a step is expected to cost with the placement that was decided."""

from __future__ import annotations

from collections.abc import Iterator

from moetier.errors import SettingsError
from moetier.launch.command import ServeRequest
from moetier.launch.planned import Given, plan_serving
from moetier.plan.planner import Plan
from moetier.plan.predict import chunk_parts, decode_parts


def explain(request: ServeRequest, records: int, on_gpu: bool) -> Iterator[str]:
    """Lines about one step of decode and one of a prompt, by part. records: of each layer in DRAM, as decided."""
    slots = str(request.settings.slots) if on_gpu else None
    try:
        plan = plan_serving(request.model, Given(str(records), slots, (*request.derived, *request.extra)), on_gpu).plan
    except SettingsError as error:
        yield f"expected step: not known, as the planner refuses: {error}"
        return
    yield from _steps(plan)


def _steps(plan: Plan) -> Iterator[str]:
    placement, work = plan.placement, plan.case.workload.bent(plan.costs.skew.value)
    step = decode_parts(plan.case, plan.costs)
    value, low, high = plan.metrics["decode_tok_s"]
    yield (
        f"expected decode step of one stream, {sum(step.values()) * 1e3:.2f} ms ({value:.3g} tokens/s, {low:.3g} to "
        f"{high:.3g}), workload {work.name}, engine {plan.engine.name}:"
    )
    for name, seconds in step.items():
        yield f"  {name:20} {seconds * 1e3:8.3f} ms"
    cold = f"{work.missed(placement.covered, 1):.2f} come from disk"
    missed = f"{work.missed(placement.slots, 1):.2f} have no slot, " if placement.slots else ""
    yield f"  of the {work.top_k:.0f} experts of a token in a layer, {missed}{cold}"
    chunk = placement.wanted.chunk
    yield f"expected step with {chunk:,} tokens of a prompt, the slowest of:"
    for name, seconds in chunk_parts(plan.case, plan.costs, chunk, 0).items():
        yield f"  {name:20} {seconds * 1e3:8.1f} ms"
    yield "`moetier plan MODEL --explain` has the sources; `moetier doctor --measure` replaces assumed rates"
