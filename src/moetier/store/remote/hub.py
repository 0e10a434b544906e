"""hf://ORG/NAME[@REVISION]: what files a repository has at one commit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from moetier.errors import CheckpointError
from moetier.store.remote.fetch import RemoteFile

SCHEME = "hf://"
_SOURCE = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?")


@dataclass(frozen=True)
class Repository:
    """Files by name at a fixed commit, and the headers that requests for them need."""

    name: str
    commit: str
    files: dict[str, RemoteFile]
    headers: dict[str, str]


def open_repository(source: str) -> Repository:
    """Ask the hub for a repository's files. HF_ENDPOINT, HF_TOKEN and a login are huggingface_hub's own."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise CheckpointError(f"expected hf://ORG/NAME or hf://ORG/NAME@REVISION, found {source!r}")
    name, revision = match.groups()
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise CheckpointError(f"{source} needs the package huggingface_hub: pip install huggingface_hub") from error
    try:
        api = HfApi()
        info = api.model_info(name, revision=revision, files_metadata=True, timeout=30)
    except Exception as error:  # its HTTP library and so its exceptions change with its version
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{source} cannot be opened: {said}; check the name and the network, and log in with `hf auth login` where "
            "the model asks for it"
        ) from error
    if info.sha is None:
        raise CheckpointError(f"{source}: expected a commit, found none; give one as {SCHEME}{name}@COMMIT")
    files = {}
    for entry in info.siblings or []:
        if entry.size is None or entry.size < 0 or not _is_plain(entry.rfilename):
            raise CheckpointError(f"{source}: expected files with sizes and plain names, found {entry.rfilename!r}")
        sha256 = entry.lfs.sha256 if entry.lfs else None
        url = f"{api.endpoint}/{name}/resolve/{info.sha}/{quote(entry.rfilename)}"
        files[entry.rfilename] = RemoteFile(entry.rfilename, entry.size, url, sha256)
    token = get_token()
    return Repository(name, info.sha, files, {"Authorization": f"Bearer {token}"} if token else {})


def _is_plain(name: str) -> bool:
    """Whether a name stays in the folder that it is put into."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)
