"""`moetier stack lock|verify|apply|wheel|image|status|rebase`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table

from moetier.files import write_output
from moetier_stack.build import build_patched_wheel, wheel_hash
from moetier_stack.errors import StackError
from moetier_stack.image import builder, containerfile, write_context
from moetier_stack.rebase import apply_profile, prepare_rebase
from moetier_stack.relock import Update, record_image, relock
from moetier_stack.upstream import advice, document, statuses
from moetier_stack.verify import verify as verify_all
from moetier_stack.workspace import Workspace, default_cache

app = typer.Typer(help="A pinned serving stack with carried patches.", no_args_is_help=True)
console = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Folder = Annotated[Path, typer.Option("--stack", metavar="FOLDER", help="Folder of stack.toml, stack.lock, carries/.")]
Cache = Annotated[Path | None, typer.Option(help="Where fetched archives are kept (default: the user's cache).")]
Profile = Annotated[str, typer.Option("--profile", "-p", metavar="PROFILE", help="A profile of stack.toml.")]
STACK = Path("stack")


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _space(folder: Path, cache: Path | None, offline: bool = False) -> Workspace:
    return Workspace(folder, cache or default_cache(), offline)


@app.command("lock")
def lock(
    update: Annotated[
        list[str] | None, typer.Option(metavar="PROJECT[=VERSION]", help="Let a project move; repeat for more.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="PROFILE=sha256:...", help="Only note the digest of a published image.")
    ] = None,
    stack: Folder = STACK,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Pin versions, hashes and resulting trees in stack.lock; what is pinned moves only where you ask."""
    space = _space(stack, cache)
    if image is not None:
        profile, _, digest = image.partition("=")
        if update or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise StackError(f"--image {image}: expected PROFILE=sha256:<64 hex digits>, and no --update with it")
        made = record_image(space, profile, digest)
    else:
        made = relock(space, tuple(Update.parse(text) for text in update or []), _say)
    versions = {name: source.version for name, source in made.sources.items()}
    if as_json:
        print(json.dumps({"lock": made.hash(), "sources": versions}))
    else:
        print(f"{space.lock_path}: {', '.join(f'{n} {v}' for n, v in versions.items())}; lock {made.hash()}")


@app.command("verify")
def verify(
    offline: Annotated[bool, typer.Option("--offline", help="Ask no index: archives must be in the cache.")] = False,
    stack: Folder = STACK,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Check everything, and say all that is wrong."""
    space = _space(stack, cache, offline)
    skipped = verify_all(space, _say)
    if as_json:
        print(json.dumps({"lock": space.lock.hash(), "skipped": [asdict(skip) for skip in skipped]}))
        return
    for skip in skipped:
        print(f"not checked here: {skip.check} ({skip.reason})")
    print(f"lock {space.lock.hash()} is right: {len(space.definition.profiles)} profiles")


@app.command("apply")
def apply(
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A new folder.")],
    profile: Profile,
    stack: Folder = STACK,
    cache: Cache = None,
) -> None:
    """Write the sources with a profile's carries."""
    apply_profile(_space(stack, cache), profile, destination)
    print(str(destination))


@app.command("wheel")
def wheel(
    profile: Profile,
    out: Annotated[Path, typer.Option(help="Folder for the wheel.")] = Path("dist"),
    stack: Folder = STACK,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Make the wheel of a profile: the pinned one with its carries, byte for byte the same every time."""
    path = build_patched_wheel(_space(stack, cache), profile, out)
    if as_json:
        print(json.dumps({"wheel": str(path), "sha256": wheel_hash(path)}))
    else:
        print(f"{path}\nsha256 {wheel_hash(path)}")
        print(f"install it: pip install {path}")


@app.command("image")
def image(
    profile: Profile,
    only_print: Annotated[bool, typer.Option("--print", help="Print the Containerfile and do nothing.")] = False,
    moetier_wheel: Annotated[
        Path | None, typer.Option(metavar="WHEEL", help="moetier's own wheel (`pip wheel --no-deps .`).")
    ] = None,
    context: Annotated[Path, typer.Option(help="New folder for what the build needs.")] = Path("dist/image"),
    tag: Annotated[str | None, typer.Option(help="Name of the image (default: moetier:PROFILE).")] = None,
    stack: Folder = STACK,
    cache: Cache = None,
) -> None:
    """Build the image of a profile with buildx, podman or buildah; without one, write its context and print it."""
    space = _space(stack, cache)
    if only_print:
        print(containerfile(space, profile), end="")
        return
    if moetier_wheel is None:
        raise StackError("an image needs moetier's own wheel: `pip wheel --no-deps -w dist .`, then --moetier-wheel")
    made = write_context(space, profile, moetier_wheel, context)
    tool = builder()
    if tool is None:
        print((made / "Containerfile").read_text(), end="")
        _say(f"no working buildx, podman or buildah here: the context is {made}, and this is its Containerfile")
        return
    tool.build(made, tag or f"moetier:{profile}")


@app.command("status")
def status(
    against: Annotated[str, typer.Option(metavar="VERSION|all", help="A version, or every watched one.")] = "all",
    doc: Annotated[
        Path | None, typer.Option(help="Write the result there too (default with all: docs/upstream.md).")
    ] = None,
    stack: Folder = STACK,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Say for every carry whether it applies, needs a rebase or has landed upstream."""
    space = _space(stack, cache)
    found = statuses(space, None if against == "all" else _version(against), _say)
    if doc is None and against == "all":
        doc = space.folder / ".." / "docs" / "upstream.md"
    if doc is not None:
        write_output(doc, document(space, found))
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    table = Table("carry", "version", "state", "to do")
    for one in found:
        pinned = space.lock.sources[space.definition.carry(one.carry).target].version
        table.add_row(one.carry, one.version, str(one.state), advice(one, pinned))
    Console().print(table, markup=False)
    for one in found:
        for hunk in one.hunks:
            if hunk.change:
                print(f"\n{one.carry} on {one.version}: {hunk.label} needs a rebase; upstream changed:")
                print(hunk.change)


@app.command("rebase")
def rebase(
    carry: Annotated[str, typer.Argument(metavar="CARRY", help="Id of a carry.")],
    onto: Annotated[str, typer.Option("--onto", metavar="VERSION", help="Version to move the carry to.")],
    destination: Annotated[Path | None, typer.Option("--dest", help="New folder (default: CARRY-VERSION).")] = None,
    stack: Folder = STACK,
    cache: Cache = None,
) -> None:
    """Prepare a git work tree of another version with the carry on top, conflicts and all."""
    folder = destination or Path(f"{carry}-{onto}")
    space = _space(stack, cache)
    clean = prepare_rebase(space, carry, _version(onto), folder)
    path = (space.folder / "carries" / space.definition.carry(carry).target / f"{carry}.patch").resolve()
    then = f"`git -C {folder} format-patch -1 --stdout --no-signature --zero-commit > {path}`"
    if clean:
        print(f"{folder}: the carry went on without a conflict; run {then}")
    else:
        print(
            f"{folder}: resolve the conflict that `git status` shows there, git add, git am --continue; then run {then}"
        )


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise StackError(f"expected a version such as 0.33.0, found {text!r}") from None
