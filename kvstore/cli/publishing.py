"""Options of ``kvstore up`` for the publisher of KV events that it runs beside its workers."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.cli.events import Endpoints
from kvstore.cli.options import HOST_PORT, option
from kvstore.cli.security_options import ServerAccess
from kvstore.errors import InvalidRequest

ANYWHERE = "tcp://*:0"
ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where the publisher listens."""

    publish: str | None = option(
        "--events",
        metavar="ENDPOINT",
        help="Where subscribers of KV events connect, such as tcp://*:5557; by default there are no events.",
    )
    replay: str = option(
        "--events-replay",
        metavar="ENDPOINT",
        default=ANYWHERE,
        show_default=True,
        help="Where they ask for what they missed.",
    )
    query: str = option(
        "--events-query",
        type=HOST_PORT,
        default=ANY_PORT,
        show_default=True,
        help="Where the publisher answers POST /query.",
    )
    certificate: str | None = option(
        "--events-curve-certificate", metavar="FILE", help="Our certificate for CURVE, with its secret key."
    )
    clients: str | None = option(
        "--events-curve-clients", metavar="FOLDER", help="Folder with the public keys of those who may subscribe."
    )

    def endpoints(self, secured: ServerAccess) -> Endpoints | None:
        """Returns the options of ``kvstore events``; None if there is to be none. Raises InvalidRequest."""
        if self.publish is None:
            if self.certificate or self.clients or self.replay != ANYWHERE or self.query != ANY_PORT:
                raise InvalidRequest("--events-... are for a publisher of KV events: give --events ENDPOINT too")
            return None
        found = Endpoints(
            self.publish,
            self.replay,
            self.query,
            self.certificate,
            self.clients,
            secured.access_file,
            secured.insecure,
        )
        found.at("--events-")
        return found
