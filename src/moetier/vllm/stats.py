"""Our counters in vLLM's /metrics, and a line in its log beside its own: entry point of `vllm.stat_logger_plugins`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from moetier.engine import Counters
from moetier.engine.counters import Checks
from moetier.launch.counting import Snapshot, line, read_snapshots
from moetier.vllm.plugin import NAME

logger = init_logger(f"vllm.{__name__}")

PER_LAYER = {
    "calls": "Layer calls",
    "tokens": "Tokens of layer calls",
    "pairs": "Pairs of a token and an expert",
    "hits": "Distinct experts of layer calls that were in the fastest tier",
    "misses": "Distinct experts of layer calls that were not in the fastest tier",
    "dram_fills": "Records read from disk that stayed in DRAM",
    "slot_fills": "Records copied into device slots",
    "streamed_bytes": "Bytes of records copied to the device to be used once",
}
TIMES = {
    "cpu_us": ("cpu_microseconds", "Time of the CPU's kernels"),
    "wait_us": ("wait_microseconds", "Time that layer calls waited for a lower tier"),
}
TIERS = {"device": "device_reads", "dram": "dram_reads", "disk": "disk_reads"}
PER_RANK = {
    "disk_reads": ("store_reads", "Records read from the store, those of the start included"),
    "disk_bytes": ("store_bytes", "Bytes of records read from the store"),
    "disk_retries": ("store_retries", "Records read again because their checksum was wrong"),
    "healed": ("records_healed", "Records healed from the checkpoint"),
}
CHECKS = {
    "records": ("sentinel_records", "Records in memory whose bytes were compared with their checksums"),
    "rounds": ("sentinel_rounds", "Times that every record in memory was"),
    "calls": ("sentinel_calls", "Rows of layer calls that were computed again by another core and instruction set"),
    "wrong_records": ("corrupt_records", "Records in memory whose bytes were wrong"),
    "wrong_calls": ("corrupt_calls", "Rows of layer calls that differed when they were computed again"),
    "us": ("sentinel_microseconds", "CPU time of these checks"),
}
assert {*PER_LAYER, *TIMES, *TIERS.values()} == {field.name for field in fields(Counters)}, "a counter has no metric"
assert {*CHECKS} == {field.name for field in fields(Checks)}, "a check has no metric"


class Collector:
    """Reads the ranks' files when /metrics is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        return metrics(read_snapshots(self.folder))

    def describe(self) -> Iterable[Metric]:
        """Nothing is collected at registration."""
        return ()


def metrics(snapshots: list[Snapshot]) -> list[Metric]:
    """All of our metrics."""
    labels = ["rank", "layer"]
    rate = GaugeMetricFamily(
        "moetier_hit_rate", "Share of hits among the distinct experts of layer calls since the start", labels=labels
    )
    reads = CounterMetricFamily(
        "moetier_reads", "Distinct experts of layer calls by the tier that they came from", labels=[*labels, "tier"]
    )
    named = {name: (name, text) for name, text in PER_LAYER.items()} | TIMES
    families = {
        name: CounterMetricFamily(f"moetier_{metric}", text, labels=labels) for name, (metric, text) in named.items()
    }
    ranks = {
        name: CounterMetricFamily(f"moetier_{metric}", text, labels=["rank"])
        for name, (metric, text) in (PER_RANK | CHECKS).items()
    }
    direct = GaugeMetricFamily(
        "moetier_store_direct", "Whether the store is read past the page cache (1) or through it (0)", labels=["rank"]
    )
    for snapshot in snapshots:
        rank = str(snapshot.rank)
        direct.add_metric([rank], float(snapshot.direct))
        for name, family in ranks.items():
            family.add_metric([rank], getattr(snapshot.checks if name in CHECKS else snapshot, name))
        for number, counters in snapshot.layers.items():
            place = [rank, str(number)]
            rate.add_metric(place, counters.hit_rate)
            for name, family in families.items():
                family.add_metric(place, getattr(counters, name))
            for tier, name in TIERS.items():
                reads.add_metric([*place, tier], getattr(counters, name))
    return [rate, reads, *families.values(), *ranks.values(), direct]


class MoetierStatLogger(StatLoggerBase):
    """Lives in vLLM's frontend. Where moetier does not serve the model, or has no counters_folder, it does nothing."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        additional = vllm_config.additional_config
        settings = additional.get(NAME, {}) if isinstance(additional, dict) else {}
        folder = settings.get("counters_folder")
        self._folder = Path(folder) if folder else None
        self._before: list[Snapshot] = []
        if self._folder is not None and engine_index == 0:
            _register(self._folder)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """VLLM's own numbers are vLLM's to tell."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Now and then, as vLLM decides (VLLM_LOG_STATS_INTERVAL): what was done since the last time."""
        if self._folder is None:
            return
        now = read_snapshots(self._folder)
        if text := line(now, self._before):
            logger.info("moetier: %s", text)
        self._before = now


_registered: list[Collector] = []


def _register(folder: Path) -> None:
    """One collector a process: a later engine's folder takes the place of the earlier one's."""
    if _registered:
        _registered[0].folder = folder
        return
    collector = Collector(folder)
    REGISTRY.register(collector)
    _registered.append(collector)
