"""Questions and texts in-process: one item at a time, unpadded, so that no item depends on the others."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import torch

from moetier.eval.ask import CLOSE_THINKING
from moetier.eval.items import Item, Text
from moetier.eval.quality_model import QualityModel
from moetier.eval.report import Result

MAX_TOKENS = {"arithmetic": 48, "needle": 24, "toolcalls": 96, "json": 64, "copy": 64}
"""The most tokens of an answer, by set: those that the models' published scores have."""
OTHER_SETS = 256
CALL = re.compile(r"<tool_call>([^\n<]*)\n?(.*?)</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def evaluate(model: QualityModel, item: Item | Text) -> Result:
    """One item in the variant that the model uses; skipped where the model's positions do not suffice."""
    return ask(model, item) if isinstance(item, Item) else read(model, item)


def ask(model: QualityModel, item: Item) -> Result:
    """A question: greedy, right only if the answer equals the expected one exactly."""
    start, limit = time.monotonic(), MAX_TOKENS.get(item.task, OTHER_SETS)
    prompt = model.tokenizer.apply_chat_template(
        list(item.messages),
        tools=list(item.tools) or None,
        add_generation_prompt=True,
        enable_thinking=item.thinking,
        return_dict=False,
    )
    if len(prompt) + limit > model.positions:
        return Result(item.task, item.id, item.digest, item.thinking, skipped=True)
    tokens = model.greedy(prompt, limit)
    stopped = tokens[-1] in model.model.config.eos_token_id
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
        seconds=round(time.monotonic() - start, 4),
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
    """What is compared with the expected: the text after the thinking, stripped; or the call (a list if not one)."""
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
