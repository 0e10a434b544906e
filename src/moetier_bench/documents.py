"""Recipes, machines and suites: YAML files of a typed schema, read strictly, hashed by what they say."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from moetier.errors import SettingsError, StoreError
from moetier.files import read_small
from moetier.machine.facts import Cpu, Gpu, Memory, hardware_identity
from moetier.settings import Settings
from moetier_bench import BenchError
from moetier_bench.probes import KINDS, AnyProbe
from moetier_bench.samples import Frozen

LARGEST = 1 << 20
"""Bytes of a document."""
SUITES = Path(__file__).parent / "suites"
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*(/[a-z0-9][a-z0-9.-]*)?")


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("expected small letters, digits, dots and hyphens, with one slash at most")
    return value


Id = Annotated[str, AfterValidator(_name)]


class ModelRef(Frozen):
    """Which model: a folder, or a repository at a revision. identity: the checkpoint's, as a store records it."""

    name: Id
    folder: str | None = None
    """Below the checkout, or {shared}/NAME: below MOETIER_SHARED_MODELS, else ../shared/models."""
    repo: str | None = None
    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
    identity: str | None = None

    @model_validator(mode="after")
    def _somewhere(self) -> ModelRef:
        if (self.folder is None) == (self.repo is None):
            raise ValueError("a model has either a folder or a repo")
        return self


class Serve(Frozen):
    """How it is served. settings: moetier's, but the store; vllm: arguments, each one word; env: variables."""

    engine: Literal["moetier", "vllm"]
    settings: dict[str, Any] = Field(default_factory=dict)
    kv_cache_gib: float | None = Field(None, gt=0)
    vllm: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    start_seconds: float = Field(1200, gt=0)
    """Longer than any start takes."""
    most_starts: int | None = Field(None, ge=1)
    """Starts of those that a suite asks for, where they take too long to repeat them; None: all."""

    @model_validator(mode="after")
    def _words_can_be_given(self) -> Serve:
        if any("\0" in word for word in (*self.vllm, *self.env, *self.env.values())):
            raise ValueError("a zero byte cannot be given to a program")
        if wrong := [name for name in self.env if not name or "=" in name]:
            raise ValueError(f"{wrong[0]!r} cannot be the name of a variable")
        return self

    @model_validator(mode="after")
    def _settings_are_known(self) -> Serve:
        if self.engine == "vllm" and self.settings:
            raise ValueError("stock vLLM knows no settings of moetier")
        if "store" in self.settings:
            raise ValueError("the store is chosen at the run, not in a recipe")
        try:
            Settings.parse({"store": "STORE", **self.settings})
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return self


class Requires(Frozen):
    """The least machine."""

    cpus: int = Field(default=1, ge=1)
    host_gib: float = Field(default=1, gt=0)
    gpus: int = Field(default=0, ge=0)
    gpu_gib: float = Field(default=0, ge=0)
    """GiB of each."""


class Recipe(Frozen):
    """One way to serve one model. status plan: written down, not run yet; nothing may be claimed of it."""

    id: Id
    summary: str = Field(min_length=1)
    status: Literal["run", "plan"] = "run"
    model: ModelRef
    serve: Serve
    requires: Requires = Requires()
    params: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By probe: what this model needs otherwise than the suite says, such as shorter prompts."""
    notes: str = ""

    @model_validator(mode="after")
    def _run_means_pinned(self) -> Recipe:
        if self.status == "run" and self.model.folder is None and self.model.revision is None:
            raise ValueError("a recipe that is run pins the revision of its model")
        if self.status == "run" and self.model.identity is None:
            raise ValueError("a recipe that is run names the identity of its checkpoint")
        return self


class MachineFile(Frozen):
    """A named machine: what `moetier doctor` finds of the hardware."""

    id: Id
    summary: str = Field(min_length=1)
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...] = ()

    @property
    def identity(self) -> str:
        """Identity of the hardware, as the doctor computes it."""
        return hardware_identity(self.cpu, self.memory, self.gpus)


class Suite(Frozen):
    """Which probes, with which parameters."""

    id: Id
    summary: str = Field(min_length=1)
    starts: int = Field(1, ge=1)
    """How often the server is started, for the boot-to-boot band; the probes run after the last start."""
    most_foreign_cpus: float | None = Field(None, ge=0)
    """Cells measured while other processes used more CPUs than this are null; None: it is only recorded."""
    check_at_end: bool = False
    """Whether the server compares its tables and bytes when it ends, after the probes."""
    probes: tuple[AnyProbe, ...]

    @model_validator(mode="after")
    def _each_once(self) -> Suite:
        names = [probe.probe for probe in self.probes]
        if len(set(names)) != len(names):
            raise ValueError("a probe occurs twice")
        return self

    def probes_for(self, recipe: Recipe) -> tuple[AnyProbe, ...]:
        """The probes with the recipe's parameters; BenchError names one that is wrong."""
        known = {probe.probe for probe in self.probes}
        result = []
        for probe in self.probes:
            wanted = {**probe.model_dump(mode="json"), **recipe.params.get(probe.probe, {})}
            result.append(validated(type(probe), wanted, f"{recipe.id}: params.{probe.probe}"))
        if unknown := sorted(set(recipe.params) - set(PROBE_NAMES)):
            raise BenchError(f"{recipe.id}: params of unknown probes {unknown}; known: {', '.join(PROBE_NAMES)}")
        assert known <= set(PROBE_NAMES)
        return tuple(result)


PROBE_NAMES = tuple(sorted(kind.model_fields["probe"].default for kind in KINDS))
Document = TypeVar("Document", Recipe, MachineFile, Suite)


def digest(document: Frozen) -> str:
    """SHA-256 of what a document says: keys sorted, defaults included, so that layout and comments do not count."""
    return sha256_of(document.model_dump(mode="json"))


def sha256_of(value: Any) -> str:
    """SHA-256 of plain values as compact JSON with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_document(path: Path, kind: type[Document]) -> Document:
    """A document of a file; BenchError says where it departs from the schema, or from its file's name."""
    try:
        raw = yaml.load(read_small(path, LARGEST), Loader=_UniqueKeys)  # noqa: S506 (a SafeLoader)
    except FileNotFoundError:
        raise BenchError(f"{path} is not there; `moetier bench list` shows what is") from None
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}; correct or remove it") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, StoreError, ValueError) as error:
        raise BenchError(f"{path}: expected YAML, found {' '.join(str(error).split())}") from None
    document: Document = validated(kind, raw, str(path))
    name = path.stem if kind is not Recipe else f"{path.parent.name}/{path.stem}"
    if document.id != name:
        raise BenchError(f"{path}: expected the id of its place, {name}, found {document.id}")
    return document


def validated(kind: type[Any], raw: Any, where: str) -> Any:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = [
            f"{'.'.join(str(part) for part in detail['loc']) or 'the whole'}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_input=False)[:5]
        ]
        raise BenchError(f"{where}: {'; '.join(found)}") from None


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without types of Python; a key that occurs twice is an error, not the last one's victory."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        counts = Counter(key for key in keys if isinstance(key, Hashable))  # the others are refused below
        twice = sorted(str(key) for key, times in counts.items() if times > 1)
        if twice:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {', '.join(twice)} occurs twice")
        return dict(super().construct_mapping(node, deep=True))


class Library:
    """The documents of a checkout: recipes/MODEL/NAME.yaml, machines/NAME.yaml; the suites are the package's."""

    def __init__(self, root: Path) -> None:
        """root: the checkout."""
        self.root = root.resolve()

    def recipe(self, name: str) -> Recipe:
        """The recipe of an id."""
        return read_document(self._path("recipes", name), Recipe)

    def machine(self, name: str) -> MachineFile:
        """The machine of an id."""
        return read_document(self._path("machines", name), MachineFile)

    def suite(self, name: str) -> Suite:
        """The suite of an id."""
        return read_document(SUITES / f"{checked_id(name)}.yaml", Suite)

    def _path(self, folder: str, name: str) -> Path:
        return self.root / folder / f"{checked_id(name)}.yaml"

    def names(self, what: Literal["recipes", "machines", "suites"]) -> list[str]:
        """Ids of all files of a kind, readable or not."""
        folder = SUITES if what == "suites" else self.root / what
        return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))

    def lint(self) -> Iterator[str]:
        """Yield what is wrong with any document."""
        readers = {"suites": self.suite, "machines": self.machine, "recipes": self.recipe}
        good: dict[str, list[Any]] = {}
        for what, reader in readers.items():
            for name in self.names(what):  # type: ignore[arg-type]
                try:
                    good.setdefault(what, []).append(reader(name))
                except BenchError as error:
                    yield str(error)
        for recipe in good.get("recipes", []):
            for suite in good.get("suites", []):
                try:
                    suite.probes_for(recipe)
                except BenchError as error:
                    yield f"with suite {suite.id}: {error}"

    def model_folder(self, model: ModelRef) -> Path:
        """Where a recipe's model is here; BenchError if it is not."""
        if model.folder is None:
            raise BenchError(f"{model.name}: download {model.repo} and give its folder with --model")
        shared = os.environ.get("MOETIER_SHARED_MODELS") or str(self.root.parent / "shared" / "models")
        path = Path(model.folder.replace("{shared}", shared))
        path = path if path.is_absolute() else self.root / path
        if not path.is_dir():
            raise BenchError(f"{model.name}: expected its checkpoint in {path}, found no folder; give it with --model")
        return path


def checked_id(name: str) -> str:
    try:
        return _name(name)
    except ValueError as error:
        raise BenchError(f"{name!r}: {error}") from None
