"""A profile's image: a Containerfile whose every input is pinned by digest, hash or version."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from moetier_stack.build import build_patched_wheel, wheel_hash
from moetier_stack.errors import StackError
from moetier_stack.lock import PinnedProfile
from moetier_stack.wheel import local_version, named
from moetier_stack.workspace import Workspace

USER_ID = 10001
CACHE = "/var/cache/moetier"
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Where each library keeps what it compiled, tuned or captured."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
TEMPLATE = """\
# Written by `moetier stack image --profile {profile}`: do not edit.
FROM {base} AS install
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY requirements.txt wheels.txt ./
COPY wheels ./wheels
RUN python -m venv /opt/moetier \\
    && /opt/moetier/bin/pip install --no-deps --require-hashes -r requirements.txt \\
    && /opt/moetier/bin/pip install --no-deps --no-index --require-hashes -r wheels.txt

FROM {base}
LABEL org.opencontainers.image.title="moetier" \\
      org.opencontainers.image.description="{summary}" \\
      org.opencontainers.image.version="{version}" \\
      io.moetier.stack.lock="{lock}" \\
      io.moetier.stack.profile="{profile}"
{system}RUN groupadd --gid {user} moetier && useradd --uid {user} --gid {user} --no-create-home moetier \\
    && install -d -o moetier -g moetier {caches}
COPY --from=install /opt/moetier /opt/moetier
COPY stack.json /opt/moetier/stack.json
ENV PATH=/opt/moetier/bin:$PATH \\
    HOME={home} \\
    {environment}
USER {user}:{user}
RUN python -m moetier_stack.selftest /opt/moetier/stack.json
WORKDIR {home}
EXPOSE 8000
ENTRYPOINT ["moetier"]
CMD ["--help"]
"""
SYSTEM = """\
RUN apt-get update \\
    && apt-get install -y --no-install-recommends {packages} \\
    && rm -rf /var/lib/apt/lists/*
"""


def containerfile(space: Workspace, profile: str) -> str:
    """Text of the Containerfile. Its context is what `write_context` writes."""
    definition, pinned = space.definition.profile(profile), _pinned(space, profile)
    _, version = named(Path(pinned.wheel.filename))
    home = f"{CACHE}/{space.lock.cache_key(profile)}"
    environment = {**OFFLINE, **{name: f"{home}/{folder}" for name, folder in CACHES.items()}}
    return TEMPLATE.format(
        profile=profile,
        base=pinned.base,
        summary=definition.summary.replace('"', "'").replace("`", "'").replace("$", ""),
        version=local_version(str(version), profile),
        lock=space.lock.hash(),
        system=SYSTEM.format(packages=" ".join(definition.system)) if definition.system else "",
        user=USER_ID,
        caches=home,
        home=home,
        environment=" \\\n    ".join(f"{name}={value}" for name, value in environment.items()),
    )


def _pinned(space: Workspace, profile: str) -> PinnedProfile:
    space.definition.profile(profile)
    return space.lock.profile(profile)


def requirements_text(pinned: PinnedProfile) -> str:
    """Every package by version and hash, as `pip install --require-hashes` takes it."""
    return "".join(f"{pin.project}=={pin.version} --hash=sha256:{pin.sha256}\n" for pin in pinned.requirements)


def self_test(space: Workspace, profile: str) -> dict[str, object]:
    """Return what `moetier_stack.selftest` checks inside the image."""
    definition, pinned = space.definition.profile(profile), _pinned(space, profile)
    distribution, version = named(Path(pinned.wheel.filename))
    versions = {pin.project: pin.version for pin in pinned.requirements}
    versions[distribution] = local_version(str(version), profile)
    return {
        "lock": space.lock.hash(),
        "profile": profile,
        "python": definition.python,
        "versions": versions,
        "imports": [space.source_of(profile).package, "torch", "moetier"],
        "absent_distributions": list(definition.exclude.distributions),
        "absent_modules": list(definition.exclude.modules),
    }


def write_context(space: Workspace, profile: str, moetier_wheel: Path, folder: Path) -> Path:
    """The folder that an image is built from: Containerfile, requirements, two wheels, what the self-test checks."""
    if not moetier_wheel.is_file() or not re.fullmatch(r"moetier-[^-]+(-[^-]+){3,4}\.whl", moetier_wheel.name):
        raise StackError(f"{moetier_wheel}: expected moetier's own wheel; make it with pip wheel --no-deps -w dist .")
    text = containerfile(space, profile)
    if folder.exists():
        raise StackError(f"{folder} is there already; remove it, or name another with --context")
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        wheels = aside / "wheels"
        patched = build_patched_wheel(space, profile, wheels)
        ours = Path(shutil.copy2(moetier_wheel, wheels))
        lines = [f"./wheels/{path.name} --hash=sha256:{wheel_hash(path)}\n" for path in (patched, ours)]
        (aside / "wheels.txt").write_text("".join(lines))
        (aside / "requirements.txt").write_text(requirements_text(_pinned(space, profile)))
        (aside / "stack.json").write_text(json.dumps(self_test(space, profile), indent=1) + "\n")
        (aside / "Containerfile").write_text(text)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


@dataclass(frozen=True)
class Builder:
    """A program that builds images."""

    command: tuple[str, ...]

    def build(self, context: Path, tag: str) -> None:
        """Build and keep the image under `tag`; StackError if the program fails."""
        command = [*self.command, "--file", str(context / "Containerfile"), "--tag", tag, str(context)]
        if subprocess.run(command, check=False).returncode:
            raise StackError(f"{' '.join(command)} failed, its words stand above")


def builder() -> Builder | None:
    """The first of buildx, podman and buildah that works here."""
    plain = ("--load", "--provenance=false", "--sbom=false")  # one manifest, not an index with attestations
    for probe, command in (
        (
            ("docker", "buildx", "inspect"),
            ("docker", "buildx", "build", *plain),
        ),
        (("podman", "info"), ("podman", "build")),
        (("buildah", "info"), ("buildah", "build")),
    ):
        if shutil.which(probe[0]) and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return Builder(command)
    return None
