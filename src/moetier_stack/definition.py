"""stack/stack.toml: what people decide. Typed; an unknown key is an error that suggests the nearest known one."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from moetier_stack.errors import CollectedError, StackError

LARGEST = 1 << 20
"""Bytes that a stack.toml may have at most."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def _specifier(value: str) -> str:
    try:
        return str(SpecifierSet(value))
    except InvalidSpecifier:
        raise ValueError(f"expected a version range such as >=0.32,<0.33, found {value!r}") from None


def _pinned_image(value: str) -> str:
    name, at, digest = value.partition("@")
    if not at or not DIGEST.fullmatch(digest) or not re.fullmatch(r"[a-z0-9][a-z0-9._/:-]*", name):
        raise ValueError(f"expected NAME[:TAG]@sha256:<64 hex digits>, found {value!r}: a tag alone can move")
    return value


def _one_line(value: str) -> str:
    if not value.strip() or "\n" in value:
        raise ValueError("expected one line of text")
    return value.strip()


def _id(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", value):
        raise ValueError(f"expected words of a-z and 0-9 with hyphens, found {value!r}")
    return value


Id = Annotated[str, AfterValidator(_id)]
Line = Annotated[str, AfterValidator(_one_line)]
Range = Annotated[str, AfterValidator(_specifier)]
Name = Annotated[str, AfterValidator(lambda value: str(canonicalize_name(value, validate=True)))]


class Strict(BaseModel):
    """Frozen, and nothing unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Strict):
    """Where the sources of a project come from: releases of an index, or a branch of a git repository."""

    project: Name = Field(description="distribution whose source is pinned")
    package: Line = Field(description="folder of its importable package: runtime carries change files in it")
    range: Range = Field(description="versions that `stack lock` may choose")
    watch: Range = Field(">=0", description="versions that `stack status --against all` looks at")
    index: str = Field("", description="address of the index (Simple API); empty: pip's")
    git: str = Field("", description="a repository instead of an index, and")
    branch: str = Field("", description="its branch; the newest first-parent commit with a wheel is taken")
    wheel_index: str = Field("", description="index page of the wheels of a commit, with {commit} in it")

    @model_validator(mode="after")
    def _whole_git(self) -> Self:
        given = [bool(self.git), bool(self.branch), bool(self.wheel_index)]
        if any(given) and not all(given):
            raise ValueError("a git source: expected git, branch and wheel_index together")
        if self.git and "{commit}" not in self.wheel_index:
            raise ValueError("wheel_index: expected an address with {commit} in it")
        return self


class Exclude(Strict):
    """Exclusion from a profile."""

    distributions: tuple[Name, ...] = ()
    modules: tuple[Line, ...] = ()
    files: tuple[Line, ...] = ()
    """Glob patterns of files in the wheel."""


class Profile(Strict):
    """One way to build the stack."""

    summary: Line
    source: Id
    wheel: Name = Field(description="distribution whose wheel of the source's version is taken")
    carries: tuple[Id, ...] = Field(description="applied in this order")
    build: Literal["wheel", "source"] = Field("wheel", description="patch the wheel, or build from patched sources")
    python: str = Field(pattern=r"^3\.\d+$", description="Python of the image, such as 3.11")
    platform: str = Field(pattern=r"^manylinux_2_\d+_(x86_64|aarch64)$")
    base: Annotated[str, AfterValidator(_pinned_image)] = Field(description="base image, by digest")
    system: tuple[Line, ...] = Field((), description="Debian packages that the image needs, NAME=VERSION")
    requirements: tuple[Line, ...] = Field((), description="further requirements, or constraints of the wheel's")
    constraints: tuple[Line, ...] = Field((), description="locked requirements files, from here, whose versions hold")
    leave_out: tuple[Name, ...] = Field((), description="requirements of the wheel that serving does not need")
    exclude: Exclude = Exclude()

    @model_validator(mode="after")
    def _no_duplicate(self) -> Self:
        twice = sorted({name for name in self.carries if self.carries.count(name) > 1})
        if twice:
            raise ValueError(f"carries: {', '.join(twice)} twice")
        return self


class Carry(Strict):
    """A patch, and when it goes."""

    id: Id
    target: Id = Field(description="the source that it patches")
    scope: Literal["runtime", "test"]
    upstream: Line = Field(description="URL of the upstream pull request or issue, or `not filed: REASON`")
    why: Line
    evidence: Line
    drop_when: Line = Field(description="the condition under which the carry is dropped")

    @model_validator(mode="after")
    def _upstream_known(self) -> Self:
        if not re.match(r"https://\S+$|not filed: \S", self.upstream):
            raise ValueError(f"upstream: expected an https:// URL or `not filed: REASON`, found {self.upstream!r}")
        return self


class Definition(Strict):
    """The whole file."""

    format: Literal[1]
    sources: dict[Id, Source]
    profiles: dict[Id, Profile]
    carries: tuple[Carry, ...] = ()

    @model_validator(mode="after")
    def _references(self) -> Self:
        ids = [carry.id for carry in self.carries]
        problems = [f"carry {name}: the id is there twice" for name in sorted({n for n in ids if ids.count(n) > 1})]
        problems += [
            f"carry {carry.id}: target {carry.target!r} is no source; {_nearest(carry.target, self.sources)}"
            for carry in self.carries
            if carry.target not in self.sources
        ]
        targets = {carry.id: carry.target for carry in self.carries}
        for name, profile in self.profiles.items():
            if profile.source not in self.sources:
                known = _nearest(profile.source, self.sources)
                problems.append(f"profile {name}: source {profile.source!r} is not there; {known}")
            for carry in profile.carries:
                if carry not in targets:
                    problems.append(f"profile {name}: carry {carry!r} is not there; {_nearest(carry, targets)}")
                elif targets[carry] != profile.source:
                    problems.append(f"profile {name}: carry {carry} patches {targets[carry]}, not {profile.source}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def carry(self, name: str) -> Carry:
        """The carry of this id; StackError with the nearest known one."""
        for carry in self.carries:
            if carry.id == name:
                return carry
        raise StackError(f"there is no carry {name!r}; {_nearest(name, [carry.id for carry in self.carries])}")

    def profile(self, name: str) -> Profile:
        """The profile of this name; StackError with the nearest known one."""
        if name in self.profiles:
            return self.profiles[name]
        raise StackError(f"there is no profile {name!r}; {_nearest(name, self.profiles)}")

    def carries_of(self, profile: str, scope: str | None = None) -> list[Carry]:
        """A profile's carries in the order in which they apply."""
        found = [self.carry(name) for name in self.profile(profile).carries]
        return [carry for carry in found if scope in (None, carry.scope)]


Model = TypeVar("Model", bound=BaseModel)


def load_definition(path: Path) -> Definition:
    """stack.toml; CollectedError with all that is wrong in it."""
    try:
        if path.stat().st_size > LARGEST:
            raise StackError(f"{path}: expected at most {LARGEST} bytes, found {path.stat().st_size}")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StackError(f"there is no {path}; name the folder of stack.toml with --stack") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise StackError(f"{path}: expected TOML in UTF-8, found a fault: {error}") from None
    return validated(Definition, values, path)


def validated(model: type[Model], values: Any, path: Path) -> Model:
    """`values` as `model`; CollectedError that name every wrong key, and the nearest known one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise CollectedError([f"{path}: {_problem(model, detail)}" for detail in error.errors()]) from None


def _problem(model: type[BaseModel], detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = _fields(model, detail["loc"][:-1])
        return f"unknown key {where!r}; {_nearest(str(detail['loc'][-1]), known)}"
    if detail["type"] == "missing":
        return f"{where!r} is missing"
    text = str(detail["msg"]).removeprefix("Value error, ")
    return f"{where}: {text}" if where else text


def _fields(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names of the keys that are known at a place."""
    here: Any = model
    for part in location:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = field.annotation if field else None
        else:  # a key of a dict, or an index of a tuple
            here = next(
                (a for a in getattr(here, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)), None
            )
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def _nearest(name: str, known: Any) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
