"""Changes to vLLM while it runs, each with the reason; its names that are not public are used here alone.

Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from pydantic import BaseModel
from vllm import envs


@contextmanager
def seeds_rest(runner: Any) -> Iterator[None]:
    """Keep the generators of requests whose token of this step is thrown away, since their prompt goes on.

    vLLM samples for them too, then takes the draw back by the generator's offset, which a CPU's does not have: the
    engine dies ("CPU Generator does not use offset"). Without a generator they are sampled by the common one and
    nothing has to be taken back: a seeded answer depends on the seed, however the prompt was cut into steps. vLLM's
    second model runner draws by seed and position; it has no generators and no such batch.
    """
    batch = getattr(runner, "input_batch", None)
    if batch is None:
        yield
        return
    thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    kept = {row: batch.generators.pop(row) for row in thrown_away.tolist() if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(kept)


def honour_chosen_tools() -> None:
    """Make VLLM_ENFORCE_STRICT_TOOL_CALLING=0 free the calls that a model makes by itself, and no others.

    vLLM constrains calls to a format of its parser's. A model that was trained on another one wants that off, but then
    a parser that reads no plain JSON (GLM's among them) has no constraint left for `tool_choice` by name or "required"
    either: it is ignored. Those get the grammar of the tool's schema, which allows a line break between its parts.
    """
    try:
        from vllm.tool_parsers.abstract_tool_parser import ToolParser
        from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
    except ImportError:
        return  # an older vLLM, which has no such switch
    theirs = ToolParser.get_structural_tag
    if getattr(theirs, "honours_chosen_tools", False):
        return

    def get_structural_tag(self: Any, request: Any, **given: Any) -> Any:
        is_free = request.tool_choice in (None, "auto", "none")
        if is_free or envs.VLLM_ENFORCE_STRICT_TOOL_CALLING or self.supports_required_and_named:
            return theirs(self, request, **given)
        if self.structural_tag_model is None:
            return None
        tag = get_model_structural_tag(
            model=self.structural_tag_model,
            tools=request.tools,
            tool_choice=request.tool_choice,
            reasoning=given.get("reasoning", False),
            strict_level=ToolStrictLevel.PARAMETER,
        )
        _pin(tag)
        return tag

    get_structural_tag.honours_chosen_tools = True  # type: ignore[attr-defined]
    ToolParser.get_structural_tag = get_structural_tag


def _pin(node: Any) -> None:
    """Make arguments match their schema, in place.

    Of a schema that GLM's grammar here does not know, white space is bounded: a model can go on with it for ever.
    """
    from moetier.vllm.glm_calls import MARKS, STYLE, arguments_of

    if isinstance(node, (list, tuple)):
        for item in node:
            _pin(item)
    elif isinstance(node, BaseModel):
        content: Any = getattr(node, "content", None)
        if getattr(content, "style", None) == STYLE:
            content.max_whitespace_cnt, content.excludes = 1, MARKS
            node.content = arguments_of(content.json_schema) or content  # type: ignore[attr-defined]
            return
        for name in type(node).model_fields:
            _pin(getattr(node, name))
