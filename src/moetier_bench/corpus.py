"""Text for prompts that every machine has: the language reference that comes with Python.

Real text, since random tokens would spread routing over all experts and fool a drafter. Prompts of a run differ in
their first tokens, so that no prefix cache can know them.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from functools import cache
from pydoc_data.topics import topics

from moetier_bench.endpoint import Endpoint

PIECE = 60_000
"""Characters that are tokenized at a time."""

CODING = (
    "Write a Python function that returns the n-th Fibonacci number without recursion, with a docstring.",
    "Write a Python class for a stack with push, pop and peek that raises IndexError when it is empty.",
    "Write a Python function that merges two sorted lists in linear time. Explain each step.",
    "Write a C function that reverses the bytes of a 32-bit integer, and a short main that tests it.",
    "Write a Python generator that yields the prime numbers, and show how to take the first ten.",
)
"""Coding questions, for answers that end by themselves."""

WORDS = (
    "amber",
    "castle",
    "copper",
    "desert",
    "forest",
    "harbor",
    "lantern",
    "meadow",
    "orange",
    "river",
    "silver",
    "winter",
)
AROUND = 256
"""More tokens than a conversation about a document has besides it, with any model's template."""


def conversation(document: str, draw: random.Random) -> list[dict[str, str]]:
    """A chat about a document, which has a passphrase somewhere in it. The last question has one short answer (the
    passphrase, a sum, a JSON object), so that a model that knows what was asked stops by itself.
    """
    passphrase = f"{draw.choice(WORDS)}-{draw.choice(WORDS)}-{draw.randint(10, 99)}"
    end_of_line = document.find("\n", round(draw.random() * len(document)))
    at = end_of_line if end_of_line >= 0 else len(document)
    note = f"\nNote: the secret passphrase is {passphrase}.\n"
    asked = f"{document[:at]}{note}{document[at:]}\n\nWhat is the secret passphrase mentioned in the text above?"
    first = {"role": "user", "content": asked}
    one, other = draw.randrange(100, 1000), draw.randrange(100, 1000)
    further = draw.choice(
        (
            None,
            f"What is {one} + {other}?",
            f"Server {draw.choice(WORDS)}-{one % 100} in Oslo listens on port {1024 + other} and is active.\n"
            "Return a JSON object with the keys port, host, region.",
        )
    )
    if further is None:
        return [first]
    return [first, {"role": "assistant", "content": passphrase}, {"role": "user", "content": further}]


@cache
def text() -> str:
    """The whole, in a fixed order."""
    return "\n\n".join(str(topics[name]) for name in sorted(topics))


def sha256() -> str:
    """Hash of the text, which differs between versions of Python."""
    return hashlib.sha256(text().encode()).hexdigest()


class Prompts:
    """Prompts of exact token counts. Each starts with a number that was never used before."""

    def __init__(self, endpoint: Endpoint) -> None:
        """endpoint: whose tokenizer counts."""
        self._endpoint = endpoint
        self._tokens: list[int] = []
        self._read = 0
        self._taken = 0

    async def exactly(self, count: int, *, unique: bool = True) -> list[int]:
        """`count` tokens; unique: after a random head of its own."""
        head: list[int] = await self._endpoint.tokens(f"{secrets.token_hex(8)}. ") if unique else []
        head = head[:count]
        await self._have(count)
        offset = self._taken % max(1, len(self._tokens) - count)
        self._taken += 97 if unique else 0
        return (head + self._tokens[offset : offset + count])[:count]

    async def _have(self, count: int) -> None:
        """Tokenize as much as is needed; after its end the text starts again."""
        while len(self._tokens) < count + 1:
            piece = (text() * 2)[self._read % len(text()) :][:PIECE]
            self._tokens += await self._endpoint.tokens(piece)
            self._read += PIECE
