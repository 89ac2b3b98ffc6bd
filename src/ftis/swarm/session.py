"""The engine under the network exchange: its settings, opening a session, and asking everybody."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zenoh

from ftis.config import NetworkConfig, first_line
from ftis.swarm.facts import ExchangeError
from ftis.swarm.status import Stated, read_status

BLOCK = zenoh.CongestionControl.BLOCK
"""By default the engine drops all that a full queue cannot take: on a busy link, most of a large message."""


def engine_config(settings: NetworkConfig) -> zenoh.Config:
    """The engine's settings; docs/wire.md has the reasons."""
    config = zenoh.Config()
    local = [f"tcp/127.0.0.1:{settings.port}"]
    on_one_machine = not settings.listen and not settings.connect
    # The first peer of a machine gets the port that the others look for. Each has a port of its own as well, so that
    # the others stay linked when the first one dies.
    listen = [f"{local[0]}#exit_on_failure=false", "tcp/127.0.0.1:0"] if on_one_machine else list(settings.listen)
    values: dict[str, Any] = {
        "mode": settings.mode,
        "listen/endpoints": listen if settings.mode != "client" else [],
        "listen/exit_on_failure": not on_one_machine,
        "connect/endpoints": local if on_one_machine else list(settings.connect),
        "connect/timeout_ms": 15_000 if settings.mode == "client" else -1,
        "connect/exit_on_failure": settings.mode == "client",
        # A peer that comes back is met within a second, not within the default's four.
        "connect/retry": {"period_init_ms": 200, "period_max_ms": 1000, "period_increase_factor": 2},
        "scouting/multicast/enabled": False,
        "transport/shared_memory/enabled": False,
        "timestamping/enabled": True,
        "transport/link/rx/max_message_size": 8 * 1024 * 1024,
        "transport/link/tx/lease": 10_000,
        # Microseconds for which a full queue blocks before the link is closed.
        "transport/link/tx/queue/congestion_control/block/wait_before_close": 30_000_000,
    }
    if settings.tls_certificate is not None:
        if not on_one_machine and all(at.startswith("tls/") for at in (*settings.listen, *settings.connect)):
            values["transport/link/protocols"] = ["tls"]  # also to peers that a linked peer names
        values |= {
            "transport/link/tls/root_ca_certificate": settings.tls_authority,
            "transport/link/tls/listen_certificate": settings.tls_certificate,
            "transport/link/tls/listen_private_key": settings.tls_key,
            "transport/link/tls/connect_certificate": settings.tls_certificate,
            "transport/link/tls/connect_private_key": settings.tls_key,
            "transport/link/tls/enable_mtls": True,
            # The authority is the swarm's own and members' addresses change: membership is what counts.
            "transport/link/tls/verify_name_on_connect": False,
        }
    for key, value in values.items():
        config.insert_json5(key, json.dumps(value))
    return config


PROTOCOLS = "tcp|tls|udp|quic|ws"
HOST = r"\[[0-9a-fA-F:.%]+\]|[^/\[\]:\s]+"
ENDPOINT = re.compile(
    rf"(?:{PROTOCOLS})/(?:{HOST}):[0-9]{{1,5}}(?:[?#]\S*)?|(?:unixpipe|unixsock-stream|serial|vsock)/\S+"
)
"""A protocol, a host and a port; some protocols have a place of another kind."""
NEARLY = re.compile(rf"(?:({PROTOCOLS}):?//?)?({HOST})(?::([0-9]{{1,5}}))?/?")


def ways_in(settings: NetworkConfig) -> list[str]:
    """Lines on the endpoints where a peer listens, each with the address for another machine."""
    here, lines = address(), []
    if settings.mode == "client" or (settings.connect and not settings.listen):
        return [f"listens nowhere: the others reach this peer through {', '.join(settings.connect)}"]
    for endpoint in settings.listen or [f"tcp/127.0.0.1:{settings.port}"]:
        line = f"listens at {endpoint}"
        if found := re.fullmatch(rf"({PROTOCOLS})/({HOST}):([0-9]+).*", endpoint):
            protocol, host, port = found.groups()
            if host in ("127.0.0.1", "localhost", "[::1]"):
                line += f", for this machine alone: for another machine, --listen {protocol}/0.0.0.0:{port} here and "
                line += f"--connect {protocol}/{here}:{port} there"
            else:
                host = here if host in ("0.0.0.0", "[::]") else host
                line += f": the others give --connect {protocol}/{host}:{port}" + " and --tls" * (protocol == "tls")
        lines.append(line)
    return lines


def address() -> str:
    """This machine's address on its way to the internet; nothing is sent for it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation
        return str(probe.getsockname()[0])
    return "ADDRESS"


def require_listener(port: int) -> None:
    """Raise ExchangeError at once if nobody on this machine listens at a port: zenoh would try for a while."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        raise ExchangeError(
            f"nobody on this machine listens at port {port}: ftis status shows swarms of ftis join (other machines: "
            f"--connect); ftis watch RUN shows ftis train"
        ) from None


def check_endpoints(settings: NetworkConfig) -> None:
    """Refuse endpoints that are none, and certificates that are not there.

    Raises:
        ExchangeError: an endpoint is no ``protocol/host:port``, or a file of certificates is missing.
    """
    listen, connect = (("listen", at) for at in settings.listen), (("connect", at) for at in settings.connect)
    for key, endpoint in (*listen, *connect):
        if not ENDPOINT.fullmatch(endpoint):
            found, better = NEARLY.fullmatch(endpoint.strip()), "in tcp/192.168.1.20:7447"
            if found:
                better = f"{found[1] or 'tcp'}/{found[2]}:{found[3] or settings.port}"
            raise ExchangeError(f"{key}: {endpoint!r} is no protocol/host:port: write it as {better}")
    for file in (settings.tls_authority, settings.tls_certificate, settings.tls_key):
        if file is not None and not Path(file).is_file():
            raise ExchangeError(f"no certificate or key at {file}: make them with ftis keys new --tls")


def open_session(settings: NetworkConfig) -> zenoh.Session:
    """A session of the engine, linked as the settings say.

    Raises:
        ExchangeError: an endpoint cannot be listened on or reached, or a certificate cannot be read.
    """
    check_endpoints(settings)
    try:
        return zenoh.open(engine_config(settings))
    except zenoh.ZError as error:
        where = ", ".join((*settings.listen, *settings.connect)) or f"tcp/127.0.0.1:{settings.port}"
        reason = re.sub(r"\s+at /\S+", "", first_line(error)).rstrip(". ")  # places in the engine's source
        at_home = "; on one machine the peer that was started first listens" if "127.0.0.1" in where else ""
        raise ExchangeError(
            f"no network at {where} ({reason}): check the addresses (tcp/host:port), certificates and who "
            f"listens{at_home}"
        ) from None


def ask_everybody(
    session: zenoh.Session, key: str, seconds: float, where: zenoh.Locality = zenoh.Locality.ANY, handler: Any = None
) -> Iterable[zenoh.Reply]:
    """Every answer, several to the same key included: a lie must not take the place of a true answer.

    Args:
        handler: hears the answers instead of returning them.
    """
    replies: Iterable[zenoh.Reply] = session.get(
        key,
        handler,
        target=zenoh.QueryTarget.ALL,
        consolidation=zenoh.ConsolidationMode.NONE,
        congestion_control=BLOCK,
        timeout=seconds,
        allowed_destination=where,
    )
    return replies


class Question:
    """A question that is over with the first right answer, else after its time.

    The engine's threads look at answers at once. A queue that nobody reads yet would fill memory with answers without
    end, and a full queue would keep the engine from receiving anything else.

    Args:
        is_right: (another peer's answer) → whether no other is needed; called on the engine's threads.
        end: called there when the question is over.

    Raises:
        zenoh.ZError: the session closes, or there is no link for a moment.
    """

    def __init__(
        self,
        session: zenoh.Session,
        key: str,
        seconds: float,
        is_right: Callable[[zenoh.Sample], bool],
        end: Callable[[], None],
    ) -> None:
        self._is_right, self._end = is_right, end
        self.over = False
        hears = zenoh.handlers.Callback(self._hear, drop=self._be_over, indirect=False)
        ask_everybody(session, key, seconds, zenoh.Locality.REMOTE, hears)

    def _hear(self, reply: zenoh.Reply) -> None:
        if reply.ok is not None and not self.over and self._is_right(reply.ok):
            self._be_over()

    def _be_over(self) -> None:
        if not self.over:
            self.over = True
            self._end()


def key_of(subject: str, recipe: str = "*", peer: str = "*") -> str:
    """The key of a peer's ``facts`` or ``status``; by default of all."""
    return f"ftis/{subject}/{recipe}/{peer}"


def ask_status(session: zenoh.Session) -> list[Stated]:
    """The status of each reachable peer of any run, as it says itself."""
    replies = ask_everybody(session, key_of("status"), seconds=1.0)
    found = (read_status(reply.ok.payload.to_bytes()) for reply in replies if reply.ok is not None)
    return sorted(filter(None, found), key=lambda status: (str(status.name), str(status.peer)))
