"""hf://ORG/NAME[@REVISION]: what files a repository has at one commit."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from urllib.parse import quote

from moetier.errors import CheckpointError
from moetier.store.remote.fetch import RemoteFile, may_carry_credentials

logger = logging.getLogger(__name__)

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
    """Ask the hub for a repository's files. HF_ENDPOINT, HF_TOKEN and a login are huggingface_hub's own.

    The token goes to no server where others can read it on the way: one line says so, and it is not sent.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise CheckpointError(f"expected hf://ORG/NAME or hf://ORG/NAME@REVISION, found {source!r}")
    name, revision = match.groups()
    try:
        from huggingface_hub import HfApi, constants, get_token
    except ImportError as error:
        raise CheckpointError(f"{source} needs the package huggingface_hub: pip install huggingface_hub") from error
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise CheckpointError(
            "the hub's token (HF_TOKEN, or of a login): expected printable ASCII, found other characters; set or unset "
            "HF_TOKEN, or log in again with `hf auth login`"
        )
    try:
        api = HfApi(token=token or False)
        if token and not may_carry_credentials(api.endpoint):
            logger.warning("HF_ENDPOINT %s: others could read your token on the way, it is not sent", api.endpoint)
            token, api.token = None, False
        info = api.model_info(name, revision=revision, files_metadata=True, timeout=30)
    except Exception as error:  # its HTTP library and so its exceptions change with its version
        said = (str(error).splitlines() or [type(error).__name__])[0]
        said = said.replace(token, "***") if token else said
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
    return Repository(name, info.sha, files, {"Authorization": f"Bearer {token}"} if token else {})


def _is_plain(name: str) -> bool:
    """Whether a name stays in the folder that it is put into."""
    parts = name.split("/")
    return all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)
