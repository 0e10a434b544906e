"""Questions and texts in-process.

Questions go through the model together only where their prompts have equally many tokens: nothing is padded, so an
item's answer does not depend on those beside it but for the order in which float32 sums of dense layers add up.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from moetier_bench.eval.ask import CLOSE_THINKING
from moetier_bench.eval.items import Item, Text
from moetier_bench.eval.quality_model import QualityModel
from moetier_bench.eval.report import Result

MAX_TOKENS = {"arithmetic": 48, "needle": 24, "toolcalls": 96, "json": 64, "copy": 64}
"""The most tokens of an answer, by set: those that the models' published scores have."""
OTHER_SETS = 256
LARGEST_GROUP = 32
CALL = re.compile(r"<tool_call>([^\n<]*)\n?(.*?)</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def groups(model: QualityModel, items: Sequence[Item | Text]) -> list[list[Item | Text]]:
    """The items in groups for `evaluate`: questions alike in set, thinking and number of tokens; texts alone."""
    questions: dict[tuple[str, bool, int], list[Item | Text]] = {}
    texts: list[list[Item | Text]] = []
    for item in items:
        if isinstance(item, Item):
            key = item.task, item.thinking, len(prompt_of(model, item))
            questions.setdefault(key, []).append(item)
        else:
            texts.append([item])
    cut = [group[i : i + LARGEST_GROUP] for group in questions.values() for i in range(0, len(group), LARGEST_GROUP)]
    return cut + texts


def evaluate(model: QualityModel, group: Sequence[Item | Text]) -> list[Result]:
    """One group in the variant that the model uses; skipped where the model's positions do not suffice."""
    questions = [item for item in group if isinstance(item, Item)]
    texts = [item for item in group if isinstance(item, Text)]
    return (ask(model, questions) if questions else []) + [read(model, text) for text in texts]


def prompt_of(model: QualityModel, item: Item) -> list[int]:
    """Tokens of a question, as the checkpoint's chat template writes it."""
    tokens: list[int] = model.tokenizer.apply_chat_template(
        list(item.messages),
        tools=list(item.tools) or None,
        add_generation_prompt=True,
        enable_thinking=item.thinking,
        return_dict=False,
    )
    return tokens


def ask(model: QualityModel, items: Sequence[Item]) -> list[Result]:
    """Questions of one set with equally many tokens: greedy, right only if the answer equals the expected exactly."""
    start, limit = time.monotonic(), MAX_TOKENS.get(items[0].task, OTHER_SETS)
    prompts = [prompt_of(model, item) for item in items]
    if len(prompts[0]) + limit > model.positions:
        return [Result(item.task, item.id, item.digest, item.thinking, skipped=True) for item in items]
    answers = model.greedy(prompts, limit)
    seconds = (time.monotonic() - start) / len(items)
    return [_scored(model, item, tokens, seconds) for item, tokens in zip(items, answers, strict=True)]


def _scored(model: QualityModel, item: Item, tokens: list[int], seconds: float) -> Result:
    stopped = tokens[-1] in model.stops
    found = answer_of(model.tokenizer.decode(tokens[:-1] if stopped else tokens), item)
    return Result(
        item.task,
        item.id,
        item.digest,
        item.thinking,
        correct=found == item.expected,
        answer=found,
        finish_reason="stop" if stopped else "length",
        tokens=len(tokens),
        seconds=round(seconds, 4),
    )


def read(model: QualityModel, item: Text) -> Result:
    """A text: minus the log-likelihood of its tokens, each given those before it."""
    start = time.monotonic()
    tokens = model.tokenizer.encode(item.text, add_special_tokens=False)
    if len(tokens) > model.positions:
        return Result(item.task, item.id, item.digest, thinking=False, skipped=True, nats=0.0)
    logits = model.logits(tokens)[:-1].double()
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
    return Result(
        item.task,
        item.id,
        item.digest,
        thinking=False,
        tokens=len(tokens) - 1,
        seconds=round(time.monotonic() - start, 4),
        nats=float(nats),
        bytes=len(item.text.encode()),
    )


def answer_of(text: str, item: Item) -> str | dict[str, Any] | list[dict[str, Any]]:
    """Return the answer to compare: the text after the thinking, stripped; or the call (a list if not one)."""
    if isinstance(item.expected, str):
        return text.rpartition(CLOSE_THINKING)[2].strip()
    calls = [_call(name.strip(), arguments, item) for name, arguments in CALL.findall(text)]
    return calls[0] if len(calls) == 1 else calls


def _call(name: str, arguments: str, item: Item) -> dict[str, Any]:
    """Values are written as they are where the tool's schema says string, else as JSON."""
    functions = [tool["function"] for tool in item.tools if tool["function"]["name"] == name]
    schema = functions[0]["parameters"]["properties"] if functions else {}
    found = {}
    for key, value in ARGUMENT.findall(arguments):
        found[key] = value if schema.get(key, {}).get("type") == "string" else _json(value)
    return {"name": name, "arguments": found}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
