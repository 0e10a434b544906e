"""Rows about what would serve it: vLLM, the device, code of the checkpoint, and its drafter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moetier.checkpoint import config as keys
from moetier.decision.facts import Facts
from moetier.decision.kinds import kind_of
from moetier.decision.row import Found, Here
from moetier.decision.support import check
from moetier.machine.facts import Answer, Support
from moetier.vllm_arguments import has

TRUST = "--trust-remote-code"
NGRAM = re.compile(r"ngram|suffix")
TIKTOKEN = ("kimi",)
"""Model types, by prefix, whose tiktoken.model transformers reads itself. Of others it makes a tokenizer that knows no
text, without a word: those need a tokenizer.json, or their own code."""


def architecture_row(f: Facts, here: Here) -> Iterator[Found]:
    if here.vllm is not None and here.vllm.knows(f.architectures) is False:
        yield Found(
            f"is of an architecture that vLLM {here.vllm.version} does not know: {', '.join(f.architectures)} (model "
            f"type {f.model_type})",
            "take a vLLM that has it; where a plugin of yours brings it, --skip-support-check",
        )


def supports(f: Facts, here: Here) -> tuple[Support, ...]:
    """Return what support.toml says of each kind of device, by the name of the model type that it knows."""
    if here.vllm is None:
        return ()
    found = []
    for device in dict.fromkeys(here.devices):
        each = [check(kind, here.vllm.version, device) for kind in reversed(f.model_types)]
        found.append(next((one for one in each if one.sources), each[0]))
    return tuple(found)


def support_row(f: Facts, here: Here) -> Iterator[Found]:
    for support in supports(f, here):
        if support.answer is Answer.FAILS:
            yield Found(
                f"is known to fail here: {support}",
                "take another vLLM or device, or, if this one is mended, --skip-support-check",
            )


def config_code_row(f: Facts, here: Here) -> Iterator[Found]:
    needs = f.config.get("auto_map")
    native = here.vllm is not None and here.vllm.model_types is not None and f.model_types[-1] in here.vllm.model_types
    if isinstance(needs, dict) and "AutoConfig" in needs and not native:
        yield _code("config.json", needs["AutoConfig"], here)


def tokenizer_code_row(f: Facts, here: Here) -> Iterator[Found]:
    mapped = f.tokenizer.config.get("auto_map")
    code = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    named = str(f.tokenizer.config.get("tokenizer_class") or "")
    known = (here.vllm.tokenizers if here.vllm is not None else None) or frozenset()
    by_type = any(kind in known and (f.tokenizer.whole or kind.startswith(TIKTOKEN)) for kind in f.model_types)
    native = named.removesuffix("Fast") in known or named in known or by_type
    if code and not native and not has(here.arguments, "--tokenizer"):
        yield _code("tokenizer_config.json", code, here)


def _code(where: str, code: object, here: Here) -> Found:
    files = [one for one in (code if isinstance(code, list) else [code]) if isinstance(one, str)]
    return Found(
        f"brings Python code of its own that vLLM would have to run (auto_map in {where}: {', '.join(files)[:200]})",
        f"read it, and if you trust it, serve with `-- {TRUST}`",
    )


def drafter_problem(f: Facts) -> str | None:
    """Return what is wrong with the drafter, as what "it has"; None: there is none, or a store holds it."""
    if f.left_out:
        return f"layers that a store does not hold: {'; '.join(f.left_out)}"
    experts, top_k = keys.size(f.text, keys.EXPERTS), keys.size(f.text, keys.TOP_K)
    sizes = keys.size(f.text, ("dspark_n_routed_experts",)), keys.size(f.text, ("dspark_num_experts_per_tok",))
    if any(size not in (None, own) for size, own in zip(sizes, (experts, top_k), strict=True)):
        return f"{sizes[0] or experts} experts, top-{sizes[1] or top_k}, and the model {experts}, top-{top_k}"
    for layer in f.draft_layers:
        found = f.parts[layer].experts if layer in f.parts else experts
        if found != experts:
            return f"{found} experts (layer {layer.number}, {layer.name}), and the model {experts}"
        kind = kind_of(f.parts[layer], f.config) if layer in f.parts else None
        if kind is not None and not kind.read:
            return f"experts in a format that moetier does not read: {kind.name} (layer {layer.number})"
    whole = f.headers and f.trimmed_format is None
    if whole and f.announced_drafts and not f.draft_layers and not any(map(f.drafts, f.tensors)):
        return f"{f.announced_drafts} layers by config.json, and none among the tensors"
    return next((f"experts under a name that is not known yet ({name})" for name in f.unknown_names.values()
                 if f.layers and f.drafts(name)), None)  # fmt: skip


def drafter_row(f: Facts, here: Here) -> Iterator[Found]:
    problem = drafter_problem(f)
    if problem:
        yield Found(
            f"brings a drafter (speculative decoding) that moetier does not serve: it has {problem}",
            "serve without --speculative-config",
        )


def speculation_row(f: Facts, here: Here) -> Iterator[Found]:
    asked = [one.partition("=")[0] for one in here.arguments if one.startswith(("--spec", "-sc"))]
    problem = drafter_problem(f)
    if asked and problem and not NGRAM.search(" ".join(here.arguments)):
        yield Found(f"cannot speculate with its own drafter, which has {problem}", f"leave {asked[0]} out")
