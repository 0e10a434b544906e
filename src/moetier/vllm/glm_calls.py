"""The grammar of a tool call in GLM's format for arguments that match the tool's schema, with or without line breaks.

vLLM's own allows white space around a value, which becomes part of it, and marks inside of one, which end it early.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
)

STYLE = "glm_xml"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
PLAIN = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "definitions"}
"""Keys of a schema whose properties stand for themselves."""


def arguments_of(schema: Any) -> Any | None:
    """The format of a call's arguments; None for a schema that says more than which properties there are."""
    if not isinstance(schema, dict) or not schema.keys() <= PLAIN or not isinstance(schema.get("properties"), dict):
        return None
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(name in schema["properties"] for name in required):
        return None
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return _in_turn(_line_break(), *_pairs(schema["properties"], required, shared))


def _pairs(properties: dict[str, Any], required: list[str], shared: dict[str, Any]) -> Iterator[Any]:
    for key, schema in properties.items():
        name, end = ConstStringFormat(value=f"<arg_key>{key}</arg_key>"), ConstStringFormat(value="</arg_value>")
        begin = ConstStringFormat(value="<arg_value>")
        pair = _in_turn(name, _line_break(), begin, _value(schema, shared), end, _line_break())
        yield pair if key in required else OptionalFormat(content=pair)


def _value(schema: Any, shared: dict[str, Any]) -> Any:
    """Strings stand as they are, everything else as JSON."""
    schema = schema if isinstance(schema, dict) else {}
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    if constants and isinstance(constants, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in constants]
        return OrFormat(elements=[ConstStringFormat(value=text) for text in texts])
    if schema.get("type") == "string":
        return _text(schema)
    if "type" not in schema and not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
        return AnyTextFormat(excludes=MARKS)
    return JSONSchemaFormat(json_schema={**schema, **shared}, max_whitespace_cnt=1, excludes=MARKS)


def _text(schema: dict[str, Any]) -> Any:
    if "pattern" in schema:
        return RegexFormat(pattern=str(schema["pattern"]).removeprefix("^").removesuffix("$"))
    if "minLength" in schema or "maxLength" in schema:
        return RegexFormat(pattern=f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    return AnyTextFormat(excludes=MARKS)


def _line_break() -> Any:
    return RegexFormat(pattern=r"\n?")


def _in_turn(*elements: Any) -> Any:
    return SequenceFormat(elements=list(elements))
