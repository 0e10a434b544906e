"""One typed settings object; a key that it does not know is an error that suggests the nearest."""

from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.settings import Settings


@pytest.mark.parametrize(
    ("asked", "experts", "records"),
    [
        ("auto", 256, None),
        (10, 256, 10),
        ("10", 256, 10),
        ("25%", 32, 8),
        ("0%", 32, 0),
        ("100%", 7, 7),
        ("28.999%", 100, 28),
        ("0.57%", 10000, 57),
    ],
)
def test_records_of_a_layer(asked: int | str, experts: int, records: int | None) -> None:
    assert Settings.parse({"store": "s", "dram_records": asked}).records_of(experts) == records


def test_more_records_than_experts() -> None:
    with pytest.raises(SettingsError, match="300 experts of each layer were asked for, a layer has 256; say 100%"):
        Settings.parse({"store": "s", "dram_records": 300}).records_of(256)


@pytest.mark.parametrize("asked", ["-1", -1, "101%", "a quarter", "25 %", "1.5"])
def test_records_that_make_no_sense(asked: int | str) -> None:
    with pytest.raises(SettingsError, match="dram_records"):
        Settings.parse({"store": "s", "dram_records": asked})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("dram_record", "dram_records"),
        ("dramRecords", "dram_records"),
        ("thread", "threads"),
        ("heatfile", "heat_file"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown setting '{key}', did you mean '{nearest}'"):
        Settings.parse({"store": "s", key: 1})


def test_unknown_key_far_from_all_lists_them() -> None:
    with pytest.raises(SettingsError, match="known: store, dram_records"):
        Settings.parse({"store": "s", "zzzzzz": 1})


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SettingsError, match=r"'store' is missing.*'threads'|'threads'.*'store' is missing"):
        Settings.parse({"threads": 0})


def test_settings_travel_as_json() -> None:
    settings = Settings.parse({"store": "/s", "dram_records": "25%", "cpus": [0, 1]})
    assert Settings.parse(settings.model_dump(mode="json", exclude_none=True)) == settings
    assert settings.heat_path == Path("/s/heat.json")


@pytest.mark.parametrize("key", ["dram_records", "threads", "staging_records", "disk_threads"])
def test_true_is_no_number(key: str) -> None:
    with pytest.raises(SettingsError, match=f"'{key}'.*found true or false"):
        Settings.parse({"store": "s", key: True})


def test_cpus_are_numbers() -> None:
    with pytest.raises(SettingsError, match=r"'cpus'.*found true or false"):
        Settings.parse({"store": "s", "cpus": [0, True]})


@pytest.mark.parametrize("key", ["store", "heat_file", "record_calls"])
def test_empty_path(key: str) -> None:
    with pytest.raises(SettingsError, match=f"'{key}'.*found an empty one"):
        Settings.parse({"store": "s", key: ""})


@pytest.mark.parametrize(
    ("slots", "spare", "expected"),
    [(64, None, 0), (28, None, 7), (1, None, 0), (3, 8, 3), (28, 0, 0), (64, 9, 0)],
)
def test_spare_slots(slots: int, spare: int | None, expected: int) -> None:
    settings = Settings.parse({"store": "s", "slots": slots, "spare_slots": spare})
    assert settings.spare_of(slots, experts=64) == expected


@pytest.mark.parametrize("slots", [-1, "-1", True, "half", "1.5", 1.5, "\u0663", "9" * 5000])
def test_slots_that_are_no_number_of_slots(slots: object) -> None:
    with pytest.raises(SettingsError, match=r"^setting 'slots': [^;]*expected[^;]*$"):
        Settings.parse({"store": "s", "slots": slots})


@pytest.mark.parametrize(
    ("written", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), (2, (2,)), ([0, 1], (0, 1)), (None, None)], ids=repr
)
def test_cpus_as_taskset_writes_them(written: object, cpus: tuple[int, ...] | None) -> None:
    assert Settings.parse({"store": "s", "cpus": written}).cpus == cpus


@pytest.mark.parametrize(
    "written", ["all", "3-1", "0-99999999999", "-1", "", 1.5, {}, "\u0663", -1, 10**30, [-1]], ids=repr
)
def test_cpus_that_are_none(written: object) -> None:
    expected = r"^setting 'cpus[.0]*': expected (CPUs such as 0-3,8|greater than or equal to 0), found "
    with pytest.raises(SettingsError, match=expected):
        Settings.parse({"store": "s", "cpus": written})


def test_a_wrong_value_is_told_with_what_was_expected_and_found() -> None:
    with pytest.raises(SettingsError, match=r"^setting 'heat_save_seconds': expected greater than 0, found -1$"):
        Settings.parse({"store": "s", "heat_save_seconds": -1})
