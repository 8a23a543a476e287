"""TLS for gRPC at a worker. New connections use changed certificates (rule X2)."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from kvstore.errors import KVStoreError
from kvstore.security.tls import Certificate

log = logging.getLogger(__name__)


def server_credentials(certificate: Certificate, *, asks_certificates: bool) -> grpc.ServerCredentials:
    """Returns a worker's credentials; ``asks_certificates`` demands one of each client. Raises InvalidRequest."""
    used = certificate.version
    first = _configuration(certificate, asks_certificates)

    def fetch() -> Any:
        """Called by gRPC before each handshake; None keeps the certificate from before."""
        nonlocal used
        try:
            version = certificate.version
            if version == used:
                return None
            used = version
            return _configuration(certificate, asks_certificates)
        except KVStoreError as error:  # gRPC would swallow it
            log.error("certificate.not_reloaded %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=asks_certificates)


def _configuration(certificate: Certificate, asks_certificates: bool) -> grpc.ServerCertificateConfiguration:
    pems = certificate.pems
    assert pems.key is not None and pems.cert is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca if asks_certificates else None)
