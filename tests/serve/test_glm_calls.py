"""The grammar of a chosen tool's call: it takes the calls whose arguments match the schema, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from moetier.vllm.compat import honour_chosen_tools

BY_NAME = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def tokenizer(nano: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(nano)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Any:
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=4096))


@pytest.fixture(autouse=True)
def free_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make serve` has it. What is changed in vLLM is undone at the end."""
    monkeypatch.setenv("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    monkeypatch.setattr(ToolParser, "get_structural_tag", ToolParser.get_structural_tag)
    honour_chosen_tools()


def tag_of(tokenizer: Any, schema: Any, choice: Any, parser: str = "glm45") -> Any:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    question = [{"role": "user", "content": "x"}]
    request = ChatCompletionRequest(model="m", messages=question, tools=[tool], tool_choice=choice)
    return ToolParserManager.get_tool_parser(parser)(tokenizer).get_structural_tag(request)


def value(text: str) -> str:
    return f"\n<arg_key>p</arg_key>\n<arg_value>{text}</arg_value>\n"


def one(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}, "required": ["p"], **more}


INNER = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
OPTIONAL = {"type": "object", "properties": {"o": {"type": "integer"}, "p": {"type": "boolean"}}, "required": ["p"]}
CASES: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "string": (one({"type": "string"}), (value("a b"), value("")), (value("a</arg_value>b"), "", value("a") * 2)),
    "enum": (
        one({"type": "string", "enum": ["C", "1"]}),
        (value("C"), value("1")),
        (value(" C"), value("C "), value("D")),
    ),
    "const": (one({"const": 5}), (value("5"),), (value("6"), value(""))),
    "pattern": (one({"type": "string", "pattern": "^[a-c]{3}$"}), (value("abc"),), (value("abcd"), value(" abc"))),
    "length": (one({"type": "string", "minLength": 1, "maxLength": 3}), (value("abc"),), (value(""), value("abcd"))),
    "integer": (
        one({"type": "integer", "minimum": 3, "maximum": 5}),
        (value("3"),),
        (value("6"), value("x"), value("3.5")),
    ),
    "array": (one({"type": "array", "items": {"type": "integer"}, "minItems": 2}), (value("[1, 2]"),), (value("[1]"),)),
    "object": (one(INNER), (value('{"a": "x"}'),), (value('{"a": 1}'), value('{"a": "</arg_value>"}'), value("\n{}"))),
    "either": (one({"anyOf": [{"type": "integer"}, {"type": "null"}]}), (value("1"), value("null")), (value("x"),)),
    "shared": (one({"$ref": "#/$defs/P"}, **{"$defs": {"P": INNER}}), (value('{"a": "x"}'),), (value("{}"),)),
    "anything": (one({}), (value("1"), value("x")), ("",)),
    "nothing": ({"type": "object", "properties": {}}, ("", "\n"), (value("1"),)),
    "optional": (
        OPTIONAL,
        (value("true"), "<arg_key>o</arg_key><arg_value>1</arg_value>" + value("false")[1:]),
        ("", "\n<arg_key>o</arg_key>\n<arg_value>1</arg_value>\n"),
    ),
    "more-than-properties": (
        one({"type": "integer"}, minProperties=1),
        (value("1"),),
        (value("1").replace("\n", " " * 9),),
    ),
    "no-schema": (None, (value("1"),), ()),
}


@pytest.mark.parametrize("choice", ["required", BY_NAME], ids=["required", "by-name"])
@pytest.mark.parametrize(("schema", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_call_matches_its_schema(
    schema: Any, right: tuple[str, ...], wrong: tuple[str, ...], choice: Any, tokenizer: Any, compiler: Any
) -> None:
    grammar = compiler.compile_structural_tag(json.dumps(tag_of(tokenizer, schema, choice).model_dump()))
    for arguments in (*right, *wrong):
        matcher = xgrammar.GrammarMatcher(grammar)
        taken = matcher.accept_string(f"<tool_call>f{arguments}</tool_call>") and matcher.is_completed()
        assert taken == (arguments in right), arguments
    for text in ("Hello", f"<tool_call>g{right[0]}</tool_call>"):
        assert not xgrammar.GrammarMatcher(grammar).accept_string(text)


def test_the_models_own_calls_stay_free(tokenizer: Any) -> None:
    assert tag_of(tokenizer, one({"type": "string"}), "auto") is None


@pytest.mark.parametrize(
    "schema", [{"required": 5, "properties": {}}, one({"enum": 3}), one({"type": "string", "pattern": 3})]
)
def test_an_odd_schema_is_no_error_of_ours(schema: Any, tokenizer: Any) -> None:
    assert tag_of(tokenizer, schema, BY_NAME) is not None


def test_parsers_that_read_json_are_left_alone(tokenizer: Any) -> None:
    """Their chosen tools are constrained by vLLM, in another way."""
    parser = type("Json", (ToolParser,), {})
    assert parser.supports_required_and_named
    tool = {"type": "function", "function": {"name": "f", "parameters": one({"type": "string"})}}
    question = [{"role": "user", "content": "x"}]
    request = ChatCompletionRequest(model="m", messages=question, tools=[tool], tool_choice=BY_NAME)
    assert parser(tokenizer).get_structural_tag(request) is None
