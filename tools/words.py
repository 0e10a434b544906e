"""Measure the prose: words a sentence of docs and docstrings, and docstrings that begin with "Of" or "What".

    python tools/words.py [--list]

Prints a table by page and folder. --list names every docstring that begins so. Exit 1 if one of src/ does: it shall
begin with a verb, or with the thing that it names.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"^\s*(?:\||#|<|!\[|    )")
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`(\"'])")
BAD_START = re.compile(r"(?:Of|What)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those below an assignment too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def prose(markdown: str) -> str:
    """Return the paragraphs and list items of a page: no code, tables, headings or pictures."""
    kept = [line for line in FENCE.sub("", markdown).splitlines() if not NOT_PROSE.match(line)]
    return re.sub(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", ". ", "\n".join(kept))


def sentences(text: str) -> list[int]:
    """Return the number of words of each sentence."""
    found = (len(re.findall(r"[\w`'%./-]+", part)) for part in SENTENCE.split(re.sub(r"\s+", " ", text)))
    return [words for words in found if words > 1]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the docstrings that begin with Of or What")
    listing = parser.parse_args().list
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    pages: dict[str, list[int]] = {}
    counts: dict[str, list[int]] = {}
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        if name.endswith(".md") and (name.startswith("docs/") or "/" not in name):
            pages[name] = sentences(prose(path.read_text(encoding="utf-8")))
        if name.endswith(".py"):
            count = counts.setdefault(name.split("/")[0], [0, 0])
            for line, text in docstrings(path):
                count[0] += 1
                if BAD_START.match(text):
                    count[1] += 1
                    if listing or name.startswith("src/"):
                        print(f"{name}:{line}: {text.splitlines()[0]}")
    print(f"{'page':<24} {'sentences':>9} {'words each':>10} {'over 30':>8}")
    for name, found in pages.items():
        if found:
            print(f"{name:<24} {len(found):>9} {sum(found) / len(found):>10.1f} {sum(w > 30 for w in found):>8}")
    every = [words for found in pages.values() for words in found]
    print(f"{'together':<24} {len(every):>9} {sum(every) / len(every):>10.1f} {sum(w > 30 for w in every):>8}")
    print(f"\n{'docstrings of':<24} {'all':>9} {'Of, What':>10} {'share':>8}")
    for folder, (total, bad) in counts.items():
        print(f"{folder:<24} {total:>9} {bad:>10} {bad / total if total else 0:>8.1%}")
    return int(counts["src"][1] > 0)


if __name__ == "__main__":
    sys.exit(main())
