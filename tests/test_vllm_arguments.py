"""What a command line for vLLM says."""

import pytest

from moetier.errors import SettingsError
from moetier.vllm_arguments import BATCHED, LENGTH, Drafting, drafting_of, has, number_of, speculates, value_of


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ((), None),
        (("--max-model-len", "4096"), 4096),
        (("--max-model-len=4096", "--x"), 4096),
        (("--max_model_len", "4096"), 4096),
        (("--max-model-len", "1", "--max-model-len=2"), 2),
        (("--max-model-len",), None),
        (("--max-model-len", "32k"), None),
        (("--max-model-len", "0"), None),
        (("--max-model-len", "\u0663"), None),
        pytest.param(("--max-model-len", "9" * 5000), None, id="5000 digits"),
    ],
)
def test_numbers(arguments, length):
    assert number_of(arguments, LENGTH) == length


def test_the_last_of_several_names_counts():
    assert value_of(("-tp", "2", "--tensor-parallel-size=4"), "-tp", "--tensor-parallel-size") == "4"
    assert value_of(("--seed", "1"), BATCHED) is None


def test_an_option_is_there_by_any_of_its_forms():
    assert has(("--compilation-config.mode", "0"), "--compilation-config")
    assert has(("--max_num_batched_tokens=1",), BATCHED)
    assert not has(("--max-num-seqs", "4"), BATCHED)


@pytest.mark.parametrize(
    ("arguments", "drafting"),
    [
        ((), Drafting()),
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'), Drafting(2, False)),
        (('-sc={"method": "dspark", "num_speculative_tokens": 5}',), Drafting(5, True)),
        (("--speculative-config.method=dflash", "--speculative_config.num_speculative_tokens", "4"), Drafting(4, True)),
        (("--spec-method", "mtp", "--spec-tokens=3"), Drafting(3, False)),
    ],
)
def test_drafting(arguments, drafting):
    assert drafting_of(arguments) == drafting


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"num_speculative_tokens": "two"}', '{"num_speculative_tokens": -1}']
)
def test_drafting_that_is_none_is_one_error(text):
    with pytest.raises(SettingsError, match="--speculative-config"):
        drafting_of(("--speculative-config", text))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--speculative-config", '{"method": "mtp"}'), True),
        (('-sc={"method": "mtp"}',), True),
        (("--speculative_config.method=mtp",), True),
        (("--spec-tokens", "2"), True),
        (("--spec-method=mtp",), True),
        (("--spec_model", "another"), True),
        (("--max-model-len", "128"), False),
    ],
)
def test_every_way_to_ask_for_speculation_is_seen(arguments: tuple[str, ...], found: bool) -> None:
    assert speculates(arguments) is found
