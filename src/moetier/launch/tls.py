"""The certificate of a server that speaks https, looked at before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from moetier.errors import SettingsError
from moetier.launch.command import ServeRequest
from moetier.vllm_arguments import value_of


def check_certificate(request: ServeRequest) -> None:
    """SettingsError where vLLM could not open the certificate and its key, once everything else is there."""
    if not request.tls:
        return
    names = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
    certificate, key, authorities = (value_of(request.extra, name) for name in names)
    if not certificate:
        raise SettingsError("-- --ssl-keyfile: expected a certificate too, found none; give it with --ssl-certfile")
    for name, path in zip(names, (certificate, key, authorities), strict=True):
        if path and not Path(path).is_file():
            raise SettingsError(f"-- {name} {path}: expected a file, found none; name another")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # vLLM has nobody to ask
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"-- --ssl-certfile {certificate}: expected a certificate and its key in PEM without a password, found "
            f"others ({getattr(error, 'reason', None) or error}); name those that belong together"
        ) from error
    try:
        if authorities:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise SettingsError(
            f"-- --ssl-ca-certs {authorities}: expected certificates in PEM, found none; name another"
        ) from error
