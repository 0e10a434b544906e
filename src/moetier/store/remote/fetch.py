"""Ranged requests that survive a server which stalls, cuts, or answers with something else than was asked for."""

from __future__ import annotations

import http.client
import ipaddress
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from moetier.errors import CheckpointError

logger = logging.getLogger(__name__)

CHUNK = 1 << 20


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server. stall: seconds without a byte; pause: seconds before the second attempt."""

    stall: float = 30.0
    attempts: int = 8
    """Attempts in a row that bring no byte before it is an error."""
    pause: float = 0.5
    longest_pause: float = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at a fixed commit. sha256 where the repository states it."""

    name: str
    size: int
    url: str
    sha256: str | None = None


CREDENTIALS = ("Authorization", "Cookie", "Proxy-authorization")
"""Headers, as urllib spells them, that are meant for one server only."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another server (scheme, host or port) without the credentials meant for the first."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and _server(newurl) != _server(req.full_url):
            for name in CREDENTIALS:
                request.remove_header(name)
        return request


def _server(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def may_carry_credentials(url: str) -> bool:
    """Whether nobody on the way can read what is sent there: https, or this machine itself without a proxy."""
    scheme, host, _ = _server(url)
    here = host == "localhost" or _is_loopback(host)
    proxied = "http" in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    return scheme == "https" or (scheme == "http" and here and not proxied)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _opener() -> urllib.request.OpenerDirector:
    """An opener of http and https addresses alone: a redirect leads to no file and no other protocol."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


class Fetcher:
    """Gets byte ranges of files."""

    def __init__(self, headers: dict[str, str] | None = None, patience: Patience | None = None) -> None:
        self.headers = headers or {}
        self.patience = patience or Patience()
        self._opener = _opener()

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file."""
        parts: list[bytes] = []
        self.stream(file, start, stop, parts.append)
        return b"".join(parts)

    def stream(self, file: RemoteFile, start: int, stop: int, sink: Callable[[bytes], object]) -> None:
        """Give bytes [start, stop) to `sink`, in order, going on where it was cut; CheckpointError in the end."""
        failures = 0
        while start < stop:
            before, problem = start, f"the answer ended before byte {stop - 1}"
            answer = self._answer(file, start, stop)
            while True:
                try:
                    chunk = next(answer, b"")
                except urllib.error.HTTPError as error:
                    problem = f"HTTP {error.code} {error.reason}"
                    if error.code not in (408, 425, 429) and error.code < 500:
                        raise CheckpointError(f"{file.url}: {problem}; {_remedy(error.code, file.url)}") from error
                    break
                except (OSError, http.client.HTTPException, _BadAnswerError) as error:
                    problem = str(error) or type(error).__name__
                    break
                if not chunk:
                    break
                sink(chunk)  # its errors are not the network's
                start += len(chunk)
            if start == stop:
                return
            failures = 1 if start > before else failures + 1
            if failures >= self.patience.attempts:
                raise CheckpointError(
                    f"{file.url}: expected bytes {start} to {stop - 1}, found: {problem} ({failures} attempts); "
                    "check the network and run the same command again, it resumes"
                )
            logger.info("%s: %s; going on at byte %d", file.url, problem, start)
            time.sleep(min(self.patience.longest_pause, self.patience.pause * 2 ** (failures - 1)))

    def _answer(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        """Chunks of one answer, never more than were asked for."""
        request = urllib.request.Request(  # noqa: S310 (hub.py makes only http URLs)
            file.url, headers={**self.headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        )
        for name in CREDENTIALS if not may_carry_credentials(file.url) else ():
            request.remove_header(name)
        with self._opener.open(request, timeout=self.patience.stall) as answer:
            if _server(file.url)[0] == "https" and _server(answer.url)[0] != "https":
                raise CheckpointError(
                    f"{file.url}: expected every redirect to lead to https, found one to {_server(answer.url)[0]}, "
                    "where anybody on the way could change the bytes; nothing of it was taken: ask who runs that server"
                )
            _check_range(answer.status, answer.headers, file, start, stop)
            left = stop - start
            while left and (chunk := answer.read1(min(CHUNK, left))):
                yield chunk
                left -= len(chunk)


class _BadAnswerError(Exception):
    """An answer that is not to the question."""


def _check_range(status: int, headers: Any, file: RemoteFile, start: int, stop: int) -> None:
    if headers.get("Content-Encoding", "identity") != "identity":
        raise _BadAnswerError(f"an answer encoded as {headers['Content-Encoding']}")
    if status == 200 and (start, stop) == (0, file.size) and headers.get("Content-Length") == str(file.size):
        return
    wanted = f"bytes {start}-{stop - 1}/{file.size}"
    if status != 206 or headers.get("Content-Range") != wanted:
        raise _BadAnswerError(f"expected the range {wanted!r}, found status {status}, {headers.get('Content-Range')!r}")


def _remedy(code: int, url: str) -> str:
    if code == 401 and not may_carry_credentials(url):
        return "it asks for a token, and none is sent where others can read it: name it by https (HF_ENDPOINT)"
    if code in (401, 403):
        return "log in with `hf auth login`, and accept the model's terms on its page"
    return "check the repository's name and revision"
