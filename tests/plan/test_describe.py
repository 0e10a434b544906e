"""Machines in words: what is understood, with its assumptions, and what is not."""

import pytest

from moetier.budget import GIB
from moetier.errors import SettingsError
from moetier.plan.cards import card_named
from moetier.plan.describe import describe, rate, size
from moetier.plan.hardware import hardware_of


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


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("1xRTX 5090 D", "RTX 5090"),
        ("1xRTX 4090 Laptop GPU", "RTX 4090"),
        ("2xRTX 4080 SUPER", "RTX 4080"),
        ("1xRTX 3090 Ti", "RTX 3090"),
        ("1xGH200", "H200"),
        ("4xGB200", "B200"),
        ("1xA100 80GB", "A100"),
        ("1xL40", "L40S"),
        ("1xRTX 5090/RTX 4090", "RTX 5090"),
    ],
)
def test_a_card_that_is_not_known_is_refused_with_names_like_it(text, near):
    with pytest.raises(SettingsError, match=rf"did you mean .*{near}.*--gpu-rate"):
        describe(text, "64GB")
    by_memory = hardware_of(describe("1x24GB", "64GB", gpu_rate="800GB/s"))
    assert by_memory.gpu_rate.value == 800e9, "what the message says to do works"


@pytest.mark.parametrize(
    "text",
    ["4x32GB,2x24GB", "2xRTX4090+1xRTX3090", "1x24GB 1x16GB", "4x32GB;4x32GB", "1xRTX5090,RTX4090", "1xH100 and 1xH200",
     "1xRTX 5090 & RTX 4090", "2x24GB 2 x 16GB"],
)  # fmt: skip
def test_several_kinds_of_cards_are_refused(text):
    with pytest.raises(SettingsError, match="expected one kind of card"):
        describe(text, "64GB")
    assert len(describe("4x32GB", "64GB").gpus) == 4


@pytest.mark.parametrize(
    ("reported", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H20-3e", None),
        ("Graphics Device", None),
    ],
)
def test_names_that_the_driver_reports(reported, card):
    found = card_named(reported)
    assert (found and found.name) == card


def test_a_real_card_that_is_not_known_is_planned_by_its_memory_and_says_so():
    """A machine that is there is never refused for its card; what stands in is assumed, with the wider spread."""
    known, other = describe("1xRTX 4090", "64GB"), describe("1xRTX 4090", "64GB")
    laptop = other.gpus[0].model_copy(update={"name": "NVIDIA GeForce RTX 4090 Laptop GPU", "memory_bytes": 16 * GIB})
    found = hardware_of(other.model_copy(update={"gpus": (laptop,)}))
    assert found.gpu_rate.why.endswith("RTX 5080, assumed: NVIDIA GeForce RTX 4090 Laptop GPU is not known")
    assert found.gpu_rate.spread > hardware_of(known).gpu_rate.spread
    assert found.gpu_bytes == 16 * GIB


@pytest.mark.parametrize(
    "text",
    [
        "32GB",
        "0x32GB",
        "-1x32GB",
        "100x32GB",
        "4x",
        "4xRTX9999",
        "x",
        "4 x y",
        "1x500MB",
        "1x1TB",
        "4x32GBx2",
        "RTX5090",
    ],
)
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
