"""Quality in-process: the emulated arithmetics by definition, layer errors on nano, items through every variant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moetier.contract import BLOCK, Family
from moetier.contract.e4m3 import E4M3_VALUES
from moetier_bench.eval import EvalError
from moetier_bench.eval.compare import Comparison, Paired, mcnemar
from moetier_bench.eval.items import Item, Text, load_set
from tests.conftest import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from moetier_bench.eval import quality_numerics as numerics  # noqa: E402 (they import torch)
from moetier_bench.eval.quality_experts import Experts  # noqa: E402
from moetier_bench.eval.quality_layers import decibels, layer_errors  # noqa: E402
from moetier_bench.eval.quality_log import ResultLog, same_answers, verdict  # noqa: E402
from moetier_bench.eval.quality_model import QualityModel  # noqa: E402
from moetier_bench.eval.quality_numerics import ARITHMETICS, OURS, REFERENCE, TRUTH, VARIANTS  # noqa: E402
from moetier_bench.eval.quality_tasks import answer_of, evaluate, groups  # noqa: E402
from moetier_bench.eval.report import Report, Result  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

FINITE = E4M3_VALUES[np.isfinite(E4M3_VALUES)]
LADDER = np.unique(FINITE[FINITE >= 0])
"""The 127 magnitudes of e4m3, ascending from 0; their index is their code."""
TEXT = Item("copy", 0, ({"role": "user", "content": "Say a b"},), False, "a b")
TOOLS = (
    {"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}},
)
CALL = Item("toolcalls", 0, ({"role": "user", "content": "x"},), False, {"name": "f", "arguments": {"n": 1}}, TOOLS)


@pytest.fixture(scope="module")
def model(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QualityModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # nano's matrices are so small that a second thread costs more than it brings
    with QualityModel(nano, tmp_path_factory.mktemp("quality") / "store", threads=1) as opened:
        yield opened
    torch.set_num_threads(threads)


def nearest(value: float) -> float:
    """The e4m3 value nearest to a finite float in [-448, 448], ties to the even code, in exact fractions."""
    distance = [abs(Fraction(float(magnitude)) - Fraction(abs(value))) for magnitude in LADDER]
    best = min(distance)
    index = next(i for i, d in enumerate(distance) if d == best and (distance.count(best) == 1 or i % 2 == 0))
    return float(np.copysign(LADDER[index], value))


def block_of(values: np.ndarray[Any, Any]) -> Tensor:
    """Rows of 128 float32 whose first value is 448, so that their scale is 1."""
    rows = np.zeros((-(-len(values) // 127), 128), np.float32)
    rows[:, 0] = 448
    rows[:, 1:].flat[: len(values)] = values
    return torch.from_numpy(rows)


@pytest.mark.parametrize("shift", [0, -40, 60], ids=lambda shift: f"times-2^{shift}")
@pytest.mark.parametrize("where", ["values", "ties", "below-ties", "above-ties"])
def test_fp8_rounds_to_the_nearest_value(where: str, shift: int) -> None:
    ties = ((LADDER[:-1] + LADDER[1:]) / 2).astype(np.float32)
    magnitudes = {
        "values": LADDER.astype(np.float32),
        "ties": ties,
        "below-ties": np.nextafter(ties, np.float32(0)),
        "above-ties": np.nextafter(ties, np.float32(np.inf)),
    }[where]
    values = np.concatenate([magnitudes, -magnitudes])
    expected = block_of(np.array([nearest(float(value)) for value in values], np.float32))
    found = numerics.fp8_blocks(torch.ldexp(block_of(values), torch.tensor(shift)))
    assert torch.equal(found, torch.ldexp(expected, torch.tensor(shift)))


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (448.0, 1.0),
        (np.nextafter(np.float32(448), np.float32(449)), 2.0),
        (np.nextafter(np.float32(448), np.float32(0)), 1.0),
        (224.0, 0.5),
        (1.0, 2.0**-8),
        (0.875, 2.0**-9),
        (3e38, 2.0**120),
        (0.0, 2.0**-42),
        (1e-30, 2.0**-42),
        (1e-11, 2.0**-42),
    ],
)
def test_fp8_scale_is_the_least_power_of_two_without_saturation(largest: float, scale: float) -> None:
    assert largest / scale <= 448
    assert max(largest, 1e-10) / (scale / 2) > 448
    block, step = torch.zeros(1, 128), scale * 2.0**-9
    block[0, 0] = float(largest)
    if largest > 3 * step:  # subnormals: a coarser scale could not hold 3 steps, a finer one would hold 2.5
        block[0, 1:3] = torch.tensor([3 * step, 2.5 * step])
    found = numerics.fp8_blocks(block)[0]
    assert found[0] == np.float32(nearest(float(largest) / scale) * scale)
    if largest > 3 * step:
        assert (found[1:3].double() / step).tolist() == [3, 2]


@pytest.mark.parametrize("width", [32, 64, 128, 200, 256, 300])
def test_fp8_blocks_are_128_along_the_row(width: int) -> None:
    """The large value of a block rounds the small ones of its block to zero, and no others."""
    for start in range(0, width, 128):
        x = torch.full((2, width), 0.01)
        x[1, start] = 1e4
        zero = numerics.fp8_blocks(x) == 0
        assert not zero[0].any()
        expected = torch.zeros(width, dtype=torch.bool)
        expected[start + 1 : start + 128] = True
        assert torch.equal(zero[1], expected)


def by_loops(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The float64 layer, pair by pair from the definition."""
    out, limit = torch.zeros(x.shape, dtype=torch.float64), experts.family.swiglu_limit
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            inner = experts.down.shape[2]
            gate, up = (
                part.double() @ x[token].double()
                for part in (experts.gate_up[expert, :inner], experts.gate_up[expert, inner:])
            )
            if limit is not None:
                gate, up = torch.minimum(gate, torch.tensor(limit)), torch.clip(up, -limit, limit)
            out[token] += weight * (experts.down[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("family", [Family(), Family(0.5), Family(0.5, True)], ids=["plain", "clamp", "weight-first"])
def test_layer_is_the_definition(family: Family) -> None:
    generator = torch.Generator().manual_seed(1)
    experts = Experts(torch.randn(5, 64, 64, generator=generator), torch.randn(5, 64, 32, generator=generator), family)
    x, weights = torch.randn(7, 64, generator=generator), torch.rand(7, 2, generator=generator)
    ids = torch.rand(7, 5, generator=generator).topk(2).indices
    truth = by_loops(experts, x, ids, weights)
    assert torch.allclose(experts.forward(x, ids, weights, TRUTH), truth, rtol=1e-12, atol=1e-12)
    reference = experts.forward(x, ids, weights, ARITHMETICS[REFERENCE])
    assert reference.dtype == torch.float32
    assert (reference - truth).norm() < 1e-6 * truth.norm()


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8-bf16"])
def test_an_arithmetic_rounds_where_it_says(name: str) -> None:
    """One expert, one token, weight 1: the roundings written out in their order."""
    generator = torch.Generator().manual_seed(2)
    w13, w2 = torch.randn(1, 256, 128, generator=generator), torch.randn(1, 128, 128, generator=generator)
    x = torch.randn(1, 128, generator=generator)
    fp8, b16 = numerics.fp8_blocks, numerics.bf16
    operand = {"bf16": b16, "fp8": fp8, "fp8-bf16": lambda t: fp8(b16(t))}[name]
    projected = operand(x) @ w13[0].T
    if name == "fp8-bf16":
        projected = b16(projected)
    h = operand(torch.nn.functional.silu(projected[:, :128]) * projected[:, 128:])
    expected = b16(h @ w2[0].T)
    found = Experts(w13, w2, Family()).forward(x, torch.tensor([[0]]), torch.ones(1, 1), ARITHMETICS[name])
    assert torch.equal(found, expected)


def test_reference_is_transformers_own(model: QualityModel, shared_models: Path) -> None:
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(
        shared_models / "nano-bf16", dtype=torch.float32, experts_implementation="eager"
    )
    tokens = text_tokens(model, 300)
    model.use(REFERENCE)
    with torch.inference_mode():
        theirs = eager(torch.tensor([tokens])).logits[0]
    assert (model.logits(tokens) - theirs).abs().max() < 1e-3


def text_tokens(model: QualityModel, tokens: int) -> list[int]:
    found: list[int] = model.tokenizer.encode((ROOT / "models" / "README.md").read_text(), add_special_tokens=False)
    return found[:tokens]


def test_layer_errors_on_nano(model: QualityModel) -> None:
    errors = layer_errors(model, [text_tokens(model, 400)])
    assert [error.layer for error in errors] == [1, 2, 3, 4]
    for error in errors:
        assert error.tokens == 400
        assert error.relative(REFERENCE) < 1e-6
        assert error.relative("bf16") < error.relative(OURS) < 0.02
        # ours is 6 dB below FP8 in every layer: half the error
        assert error.decibels(OURS) < error.decibels("fp8") - 6
        assert error.decibels(OURS) < error.decibels("fp8-bf16") - 6
    assert decibels(0.1) == pytest.approx(-20)


def test_ours_is_the_kernels(model: QualityModel) -> None:
    """The variant "ours" is what a plain `load_model` gives, and differs from every emulation."""
    tokens = text_tokens(model, 64)
    before = model.tiers.counters.pairs
    logits = {}
    for variant in VARIANTS:
        model.use(variant)
        logits[variant] = model.logits(tokens)
        assert (model.tiers.counters.pairs > before) == (variant == OURS)
        before = model.tiers.counters.pairs
    for variant in VARIANTS:
        assert variant == OURS or not torch.equal(logits[OURS], logits[variant])
    with pytest.raises(EvalError, match="no variant 'fp4'; there are reference, ours"):
        model.use("fp4")


@pytest.mark.parametrize("variant", VARIANTS)
def test_items_through_every_variant(model: QualityModel, variant: str) -> None:
    """Items that nano does well whatever the arithmetic, and a text."""
    model.use(variant)
    items = [load_set(ROOT / "models" / "eval" / f"{task}.jsonl")[1] for task in ("copy", "json", "toolcalls")]
    results = [result for item in items for result in evaluate(model, [item])]
    assert [result.answer for result in results] == [item.expected for item in items]
    assert all(result.correct and result.finish_reason == "stop" and result.tokens > 3 for result in results)
    (text,) = evaluate(model, [Text("t", 0, (ROOT / "models" / "README.md").read_text()[:1500])])
    assert text.nats is not None
    assert 1 < text.nats / text.tokens < 5


def test_what_does_not_fit_is_skipped(model: QualityModel) -> None:
    long = "word " * 3000
    item = Item("copy", 0, ({"role": "user", "content": long},), False, "word")
    (question,), (text,) = evaluate(model, [item]), evaluate(model, [Text("t", 0, long)])
    assert question.skipped
    assert text.skipped


@pytest.mark.parametrize("variant", [REFERENCE, OURS])
def test_together_is_as_alone(model: QualityModel, variant: str) -> None:
    """Answers of different lengths in one group, equal to those of each question alone."""
    model.use(variant)
    items = [
        load_set(ROOT / "models" / "eval" / f"{task}.jsonl")[i] for task in ("json", "arithmetic") for i in range(9)
    ]
    together = groups(model, [*items, Text("t", 0, "x"), Text("t", 1, "y")])
    assert sorted((item.task, item.id) for group in together for item in group) == sorted(
        [*((item.task, item.id) for item in items), ("t", 0), ("t", 1)]
    )
    assert all(len(group) == 1 for group in together if group[0].task == "t")
    group = max((group for group in together if len(group) > 1), key=len)
    found = evaluate(model, group)
    alone = [evaluate(model, [item])[0] for item in group]
    assert [(r.id, r.answer, r.tokens, r.finish_reason) for r in found] == [
        (r.id, r.answer, r.tokens, r.finish_reason) for r in alone
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<think>x</think>\na b ", "a b"), ("a b", "a b"), ("<think>a b", "<think>a b")],
)
def test_answer_is_what_follows_the_thinking(text: str, expected: str) -> None:
    assert answer_of(text, TEXT) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"n": "1"}, {"n": 1}),
        ({"s": "1"}, {"s": "1"}),
        ({"n": "one"}, {"n": "one"}),
        ({"m": "1", "s": "a b"}, {"m": 1, "s": "a b"}),
        ({}, {}),
    ],
)
def test_call_is_typed_by_its_schema(arguments: dict[str, str], expected: dict[str, Any]) -> None:
    pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
    call = f"<tool_call>f\n{''.join(pairs)}</tool_call>"
    assert answer_of("<think></think>\n" + call, CALL) == {"name": "f", "arguments": expected}
    assert answer_of(call * 2, CALL) == [{"name": "f", "arguments": expected}] * 2
    assert answer_of("no call", CALL) == []


def test_log_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    path, about = tmp_path / "new" / "v.jsonl", {"model": "m", "variant": "v"}
    log = ResultLog(path, about)
    results = [Result("copy", i, TEXT.digest, False, correct=True, answer="a b") for i in (1, 0)]
    for result in results:
        log.add(result)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        if lines:
            assert ResultLog(path, about).results == results[: lines - 1]
            assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:lines])
    again = ResultLog(path, about)
    assert again.has(Item("copy", 1, TEXT.messages, False, "a b"))
    assert not again.has(TEXT)
    again.add(results[1])
    assert path.read_bytes() == whole
    assert [result.id for result in ResultLog(path).report().results] == [0, 1]


@pytest.mark.parametrize(
    ("line", "about", "says"),
    [
        ("{}", {"model": "other"}, "expected results of"),
        ("[]", {"model": "m"}, "expected results of a quality evaluation"),
        ('{"task"', {"model": "m"}, "expected results of a quality evaluation"),
    ],
    ids=["another-model", "no-result", "no-json"],
)
def test_log_of_something_else_is_refused(tmp_path: Path, line: str, about: dict[str, str], says: str) -> None:
    path = tmp_path / "v.jsonl"
    first = [json.dumps({"model": "m"})]
    path.write_text("\n".join([*first, *([] if line == "{}" else [line])]) + "\n")
    with pytest.raises(EvalError, match=says):
        ResultLog(path, about)


def test_log_with_an_item_twice_is_refused(tmp_path: Path) -> None:
    for log in [ResultLog(tmp_path / "v.jsonl", {"model": "m"}) for _ in range(2)]:
        log.add(Result("copy", 0, "d", False))
    with pytest.raises(EvalError, match="two runs wrote at once"):
        ResultLog(tmp_path / "v.jsonl")


def test_log_refuses_another_question(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "v.jsonl", {})
    log.add(Result("copy", 0, "another", False))
    with pytest.raises(EvalError, match="was another question"):
        log.has(TEXT)


@pytest.mark.parametrize(
    ("items", "only_reference", "only_variant", "not_worse"),
    [
        (400, 0, 0, True),
        (400, 4, 0, True),
        (400, 5, 0, False),  # 1.25 points
        (1000, 7, 0, False),  # 0.7 points, but p = 2/128
        (1000, 6, 1, True),
        (400, 0, 30, True),
    ],
)
def test_verdict(items: int, only_reference: int, only_variant: int, not_worse: bool) -> None:
    both = items - only_reference - only_variant
    a, b = tuple(map(str, range(only_reference))), tuple(map(str, range(only_variant)))
    total = Paired("all", items, both + len(a), both + len(b), a, b, mcnemar(len(a), len(b)))
    found = verdict(Comparison((total,), (), 0))
    assert found is not None
    assert found.not_worse == not_worse
    assert found.points_lost == pytest.approx(100 * (only_reference - only_variant) / items)
    assert verdict(Comparison((), (), 0)) is None


def test_same_answers_are_counted_right_or_wrong() -> None:
    def report(*answers: str | None) -> Report:
        found = [Result("t", i, "d", False, skipped=a is None, answer=a) for i, a in enumerate(answers)]
        return Report({}, (*found, Result("text", 0, "d", False, nats=1.0)))

    assert str(same_answers(report("a", "b", "c", None, "d"), report("a", "x", "c", "e", None))) == "2/3"


def test_weights_are_the_stores(model: QualityModel) -> None:
    """Every weight of a layer against the checkpoint's own bytes, by the table of E2M1 written out."""
    from safetensors import safe_open

    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.array(e2m1 + [-value for value in e2m1])
    experts = model.experts(2)
    with safe_open(ROOT / "models" / "nano-mxfp4" / "model-00001-of-00001.safetensors", framework="pt") as file:
        for expert in (0, 31):
            for name, found in (
                ("gate_proj", experts.gate_up[expert, :64]),
                ("up_proj", experts.gate_up[expert, 64:]),
                ("down_proj", experts.down[expert]),
            ):
                prefix = f"model.layers.2.mlp.experts.{expert}.{name}"
                packed = file.get_tensor(prefix + ".weight").view(torch.uint8).numpy()
                scales = file.get_tensor(prefix + ".scale").view(torch.uint8).numpy().astype(float)
                codes = np.stack([packed % 16, packed // 16], -1).reshape(packed.shape[0], -1)
                expected = values[codes] * 2.0 ** (np.repeat(scales, BLOCK, 1) - 127)
                assert np.array_equal(found.numpy(), expected)
