"""Machines in words: what is understood, with its assumptions, and what is not."""

import pytest

from moetier.errors import SettingsError
from moetier.plan.describe import describe, rate, size
from moetier.plan.hardware import GIB, hardware_of


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("256GB", 256e9), ("250GiB", 250 * 2**30), ("2TB", 2e12), ("7000 MB", 7e9), ("1.5g", 1.5e9), ("12", 12)],
)
def test_sizes(text, bytes_):
    assert size(text, "--x") == bytes_


def test_memory_is_sold_in_powers_of_two():
    assert size("256GB", "--ram", memory=True) == 256 * GIB
    assert rate("7GB/s", "--disk") == 7e9


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "0GB", "4XB", "1e99GB", "nan", "9" * 30, "4GB/s"])
def test_sizes_that_are_none(text):
    with pytest.raises(SettingsError, match="--ram"):
        size(text, "--ram")


@pytest.mark.parametrize("text", ["7GB", "fast", "7GB/h", "/s"])
def test_rates_that_are_none(text):
    with pytest.raises(SettingsError, match="--disk"):
        rate(text, "--disk")


@pytest.mark.parametrize("text", ["32GB", "0x32GB", "-1x32GB", "100x32GB", "4x", "4xRTX9999", "x", "4 x y"])
def test_gpus_that_are_none(text):
    with pytest.raises(SettingsError, match="--gpus"):
        describe(text, "64GB")


def test_what_is_not_said_is_assumed_and_says_so():
    found = hardware_of(describe("4x32GB", "256GB"))
    assert (found.gpus, found.gpu_bytes) == (4, 32 * GIB)
    assert "taken for RTX 5090" in found.gpu_name
    for known in (found.link_rate, found.dram_rate, found.disk_rate):
        assert "assumed" in known.why
    assert hardware_of(describe("1x32GB", "64GB")).dram_rate.value < found.dram_rate.value


def test_what_is_said_is_taken():
    found = hardware_of(
        describe("2xRTX4090", "128GB", "12GB/s", memory="2xDDR5-6000", pcie="4x8", gpu_rate="900GB/s", disk_size="2TB")
    )
    assert found.gpu_bytes == 24 * GIB
    assert found.disk_rate.value == 12e9
    assert found.gpu_rate.value == 900e9
    assert found.dram_rate.value == pytest.approx(2 * 6000 * 8e6 * 0.8)
    assert found.link_rate.value == pytest.approx(8 * 1.969e9 * 0.87)
    assert found.disk_bytes == 2e12


@pytest.mark.parametrize(
    "words", [{"memory": "8xSDRAM"}, {"memory": "0xDDR5"}, {"memory": "8xDDR5-000"}, {"pcie": "9x16"}, {"pcie": "5x3"}]
)
def test_words_that_are_not_understood(words):
    with pytest.raises(SettingsError):
        describe("1x32GB", "64GB", **words)


def test_unequal_gpus_are_refused():
    one, other = describe("1x32GB", "64GB"), describe("1x24GB", "64GB")
    with pytest.raises(SettingsError, match="GPUs of one size"):
        hardware_of(one.model_copy(update={"gpus": (*one.gpus, *other.gpus)}))
