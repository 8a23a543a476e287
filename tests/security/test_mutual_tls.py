"""Our own sockets with an authority for clients: a client without its certificate gets no answer."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

from kvstore.security.tls import ClientTls, ServerTls, client_certificate, server_certificate
from tests.kit.cases import for_each
from tests.kit.certificates import Authority

WAIT_S = 30.0


def is_spoken_to(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """True if the two ends come to an understanding; the server has the last word in TLS 1.3."""
    ours, theirs = socket.socketpair()
    outcome: list[bool] = []

    def serve() -> None:
        ours.settimeout(WAIT_S)
        try:
            with server.wrap_socket(ours, server_side=True) as wrapped:
                wrapped.sendall(b"!")
                outcome.append(True)
        except OSError:
            outcome.append(False)

    thread = threading.Thread(target=serve)
    thread.start()
    theirs.settimeout(WAIT_S)
    try:
        with client.wrap_socket(theirs, server_hostname="127.0.0.1") as wrapped:
            said = wrapped.recv(1)
    except OSError:
        said = b""
    finally:
        theirs.close()
        thread.join(WAIT_S)
        ours.close()
    assert outcome
    return said == b"!"


@for_each("who", ["ours", "another's", "none"])
def test_a_client_needs_a_certificate_that_the_authority_signed(tmp_path: Path, who: str) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs", "another authority")
    pair = authority.server()
    server = server_certificate(ServerTls(str(pair.cert), str(pair.key), str(authority.ca))).context(server=True)
    shown = {"ours": authority.client("somebody"), "another's": other.client("somebody"), "none": ClientTls()}[who]
    client = client_certificate(ClientTls(str(authority.ca), shown.cert_file, shown.key_file)).context(server=False)
    assert is_spoken_to(server, client) is (who == "ours")
