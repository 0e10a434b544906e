"""What a moetier wrote that knew a checkpoint by its headers only, or what it took for another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moetier.checkpoint.shards import Shards
from moetier.store.checkpoint import Checkpoint


def _rewrite(path: Path, body: dict[str, object]) -> None:
    body.pop("seal")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**body, "seal": hashlib.sha256(text.encode()).hexdigest()}, indent=1) + "\n")


def changed(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change store.json, and seal it again."""
    body = json.loads((store / "store.json").read_text())
    change(body)
    _rewrite(store / "store.json", body)


def older_store(store: Path) -> None:
    """Make store.json that of an older moetier: its identity is that of the headers, and no other is there."""
    body = json.loads((store / "store.json").read_text())
    body["checkpoint"]["identity"] = body["checkpoint"].pop("headers")
    _rewrite(store / "store.json", body)


def taken_for(store: Path, checkpoint: Checkpoint) -> None:
    """Let store.json say that the store was built from another checkpoint than it was."""
    body = json.loads((store / "store.json").read_text())
    body["checkpoint"] |= {"identity": checkpoint.identity(), "headers": checkpoint.headers}
    _rewrite(store / "store.json", body)


def older_trimmed(folder: Path) -> None:
    """The same of a trimmed checkpoint's note."""
    from moetier.store.identity import headers_identity

    path = folder / "moetier-origin.json"
    body = json.loads(path.read_text())
    body["identity"] = body.pop("headers")
    body["own"] = headers_identity((folder / "config.json").read_bytes(), Shards.open(folder))
    _rewrite(path, body)


def overwrite(checkpoint: Path, name: str, at: int, data: bytes) -> None:
    """Change bytes of a tensor where it lies."""
    tensor = Checkpoint.open(checkpoint).tensors[name]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset + (at if at >= 0 else tensor.nbytes + at))
        file.write(data)
