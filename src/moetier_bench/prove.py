"""`moetier prove`: this machine, exactness and speed of one model in one file that can be shown to anyone."""

from __future__ import annotations

import dataclasses
import gzip
import re
import tempfile
from pathlib import Path
from typing import Any

from moetier.errors import StoreError
from moetier.files import read_small
from moetier.identity.long import check_random
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.match import open_store
from moetier_bench import BenchError
from moetier_bench.check import imported_name, problems
from moetier_bench.documents import MachineFile, Recipe, Suite, validated
from moetier_bench.here import set_folders
from moetier_bench.provenance import Code, code_of, machine_here, model_files
from moetier_bench.result import LARGEST, Result, to_text, write_result
from moetier_bench.run import Run, Say
from moetier_bench.server import Place, free_port

CALLS = 500
"""Random layer calls of the identity check."""


def prove(
    model: Path,
    store: Path | None,
    settings: dict[str, Any],
    vllm: tuple[str, ...],
    suite: Suite,
    say: Say,
    calls: int = CALLS,
    env: dict[str, str] | None = None,
) -> Result:
    """Identity on the store (`calls`), then the suite through the server. Nothing of it names a folder or a prompt."""
    checkpoint = Checkpoint.open(model)
    recipe = _recipe(model, checkpoint.identity(), settings, vllm, env or {})
    with tempfile.TemporaryDirectory(prefix="moetier-prove-") as folder:
        scratch = Path(folder).resolve()
        place = Place(model.resolve(), (store or scratch / "store").resolve(), scratch, free_port())
        if not place.store.exists():
            say(f"building the store of {model.name}")
            build_store(model, place.store, check=2)
        say(f"identity: {calls} layer calls through every path of this machine")
        with open_store(place.store, checkpoint) as opened:
            identity = dataclasses.asdict(check_random(opened, calls, 0))
        root = Path(__file__).resolve().parents[2]
        run = Run(
            root,
            recipe,
            (suite,),
            _machine(),
            _code(root),
            model_files(model),
            place,
            set_folders(root),
            origin="prove",
        )
        result = run.measure(say, {"identity": {"calls": identity["calls"], "differ": identity["differ"]}})
        if result.status == "failed":
            raise BenchError(f"nothing to prove: {result.failure}")
        if identity["differ"]:
            say(f"{identity['differ']} values differ between paths: that is a bug; the file says so, please share it")
        return checked_for_paths(result, [str(path) for path in (*dataclasses.astuple(place)[:3], root, Path.home())])


def _code(root: Path) -> Code:
    """The commit; a changed tree is no commit's code."""
    code = code_of(root)
    return Code(version=code.version) if code.changed else code


def checked_for_paths(result: Result, paths: list[str]) -> Result:
    """The same result; BenchError if a folder of this machine is named in it."""
    text = to_text(result)
    named = [path for path in paths if len(path) > 1 and path in text]
    if named:
        raise BenchError(f"the file would name {', '.join(named)}; nothing was written, please report this")
    return result


def _recipe(model: Path, identity: str, settings: dict[str, Any], vllm: tuple[str, ...], env: dict[str, str]) -> Recipe:
    name = slug(model.resolve().name)
    return validated(  # type: ignore[no-any-return]
        Recipe,
        {
            "id": f"prove/{name}",
            "summary": f"{model.resolve().name}, {', '.join(f'{k} {v}' for k, v in settings.items()) or 'as it fits'}",
            "model": {"name": name, "folder": "{model}", "identity": identity},
            "serve": {"engine": "moetier", "settings": settings, "vllm": vllm, "env": env},
        },
        "what is asked for",
    )


def _machine() -> MachineFile:
    """The machine that we are on, under a name made of its hardware."""
    here = MachineFile.model_validate(machine_here("here", "here"))
    gpus = ", ".join(sorted({f"{sum(g.name == gpu.name for g in here.gpus)} x {gpu.name}" for gpu in here.gpus}))
    memory = f"{here.memory.limit_bytes / 2**30:.0f} GiB"
    what = f"{len(here.cpu.allowed)} CPUs of {here.cpu.model}, {memory}, {gpus or 'no GPU'}"
    name = f"{slug(here.cpu.model)[:24].strip('-')}-{here.identity[:8]}"
    return here.model_copy(update={"id": name, "summary": what})


def slug(text: str) -> str:
    """A name as ids are: small letters, digits, dots, hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def write_proof(result: Result, out: Path) -> None:
    """Write the file, compressed if its name ends with .gz; never over another."""
    data = to_text(result).encode()
    refuse_existing_file(out)
    try:
        with out.open("xb") as file:
            file.write(gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    except FileExistsError:
        refuse_existing_file(out)
        raise


def refuse_existing_file(out: Path) -> None:
    """BenchError where the file is there: before anything is measured, too."""
    if out.exists():
        raise BenchError(f"{out} is there already; name another file")


def import_proof(path: Path, folder: Path) -> tuple[Path, Result]:
    """Check a file of `moetier prove` and keep it beside our results; BenchError says what is wrong with it."""
    try:
        data = read_small(path, LARGEST)
        if path.suffix == ".gz":
            data = _inflated(data)
        result = Result.model_validate_json(data)
    except (ValueError, EOFError, OSError, StoreError) as error:
        said = " ".join(str(error).split())[:300]
        raise BenchError(
            f"{path}: expected a file that `moetier prove` wrote, found {type(error).__name__}: {said}"
        ) from None
    wrong = list(problems(data, result))
    if result.origin != "prove":
        wrong.append("it was not written by `moetier prove MODEL OUT`")
    if result.status == "failed":
        wrong.append("nothing was measured in it")
    if wrong:
        raise BenchError(f"{path} is refused: {'; '.join(wrong[:5])}")
    name = imported_name(result)
    if (folder / name).exists():
        raise BenchError(f"{folder / name} is there already: {path} was imported before")
    return write_result(folder, result, name, data), result


def _inflated(data: bytes) -> bytes:
    """Decompressed, up to the size that any result may have."""
    import io

    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST} bytes")
    return text
