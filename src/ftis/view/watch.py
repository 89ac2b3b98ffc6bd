"""The live page of a directory: an ASGI application and its server.

The application is read-only, and answers GET and HEAD at four paths. If there is a token, requests need it. Otherwise
the server is bound to this machine, and the Host header must be a local name, so that a foreign page cannot read the
answers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ftis.config import FtisError
from ftis.records.following import Directory
from ftis.version import extra
from ftis.view.live import Address, Shown, View, of_directory
from ftis.view.sections import asset


class WatchError(FtisError):
    """The page cannot be served."""


try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise WatchError(f"ftis watch needs {error.name}, which is not installed: pip install {extra('watch')}") from None

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine can reach; a server there needs no token."""

EVERY = 0.8
"""Seconds between two looks at the records."""

YIELDING = 10
"""The server's niceness above that of the run: if cores are scarce, the run goes first."""

SIGN_OF_LIFE = 15.0
"""The most seconds without a message to a browser, so that it notices a lost connection."""

MOST_VIEWS = 64
"""The most pages that are kept in memory."""

MOST_CONNECTIONS, HEADER_SECONDS = 200, 10.0
"""The most connections that are open at a time, and the seconds within which each has to send a request."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer. Style attributes are allowed: an arm's colour is no secret and runs nothing."""


def application(watched: Path, token: str = "") -> Starlette:
    """The ASGI application.

    Args:
        watched: a run's or an experiment's directory.
        token: the value that ``?token=`` must have; with "", only requests to this machine's own names are answered.

    Raises:
        RecordsError: the directory holds neither a run nor an experiment.
    """
    directory = Directory(watched)
    views: dict[Address, View] = {}

    def link(path: str, **query: Any) -> str:
        given = {name: value for name, value in query.items() if value is not None}
        given |= {"token": token} if token else {}
        return f"/{path}" + (f"?{urlencode(given)}" if given else "")

    def view_at(address: Address) -> View:
        if address not in views:
            if len(views) >= MOST_VIEWS:
                views.clear()
            views[address] = View(of_directory(Directory(watched), address, link), address, link)
        return views[address]

    def answered(answer: Callable[[Address], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that refuses requests without the token, by a foreign name, or with an unknown seed or arm."""

        async def endpoint(request: Request) -> Response:
            query = request.query_params
            # Against DNS rebinding: a foreign page could point its own name at this server.
            if not token and re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]") not in LOCAL:
                return _plain("This page is shown only under this machine's own names.\n", 400)
            if token and not hmac.compare_digest(query.get("token", "").encode(), token.encode()):
                return _plain("The address lacks the right token: take the one that ftis watch printed.\n", 403)
            try:
                directory.look()  # seeds and arms may have been added
            except FtisError as error:
                return _plain(f"{error}\n", 503)
            address = address_in(directory, query.get("seed"), query.get("arm"))
            return _plain("There is no such seed or arm.\n", 400) if address is None else await answer(address)

        return endpoint

    async def page(address: Address) -> Response:
        return HTMLResponse(await run_in_threadpool(view_at(address).document), headers=HEADERS)

    async def events(address: Address) -> Response:
        view = view_at(address)
        stream = changes(lambda: run_in_threadpool(view.look))
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    async def css(address: Address) -> Response:
        return Response(asset("page.css"), media_type="text/css", headers=HEADERS)

    async def script(address: Address) -> Response:
        return Response(asset("watch.js"), media_type="text/javascript", headers=HEADERS)

    paths = {"/": page, "/events": events, "/page.css": css, "/watch.js": script}
    return Starlette(
        routes=[Route(path, answered(answer)) for path, answer in paths.items()],
        exception_handlers={
            404: lambda request, error: _plain("There is nothing here.\n", 404),
            405: lambda request, error: _plain("This page can only be read.\n", 405),
        },
    )


def address_in(directory: Directory, seed: str | None, arm: str | None) -> Address | None:
    """The page that the seed and the arm in an address ask for; None if there is none."""
    seeds: dict[str | None, int | None] = {None: None, **{str(known): known for known in directory.plan.seeds}}
    arms = {None, *(known.name for known in directory.plan.arms)}
    return Address(seeds[seed], arm) if seed in seeds and arm in arms else None


def _plain(text: str, status: int) -> Response:
    return PlainTextResponse(text, status_code=status, headers=HEADERS)


async def changes(look: Callable[[], Awaitable[Shown]]) -> AsyncIterator[str]:
    """The messages to a browser: first the whole page, then the new parts at each change; none once nobody listens."""
    sent, quiet = Shown(0, "", "", {}), 0.0
    yield "retry: 1000\n\n"
    while True:
        shown = await look()
        if shown.number != sent.number:
            yield f"data: {json.dumps(_difference(sent, shown))}\n\n"
            sent, quiet = shown, 0.0
        elif quiet >= SIGN_OF_LIFE:
            yield ": still here\n\n"
            quiet = 0.0
        await asyncio.sleep(EVERY)
        quiet += EVERY


def _difference(before: Shown, now: Shown) -> dict[str, Any]:
    """The title, the header, the order of the sections, and the sections that differ."""
    differing = {anchor: html for anchor, html in now.sections.items() if before.sections.get(anchor) != html}
    return {"title": now.title, "header": now.header, "order": list(now.sections), "sections": differing}


class Connection(H11Protocol):
    """A connection that is closed unless a request comes soon, the first one or the next.

    Beyond :data:`MOST_CONNECTIONS`, the oldest one without a request makes room for a new one, else the oldest of all.
    A browser comes back within a second.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        there = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(there) > MOST_CONNECTIONS:
            # close() would wait for a client that does not read.
            min(there, key=lambda one: (one is self, one.is_answering, one.since)).transport.abort()
        self.loop.call_later(HEADER_SECONDS, self.close_idle, None)

    @property
    def is_answering(self) -> bool:
        """Whether a request has come that is not answered to its end."""
        cycle = getattr(self, "cycle", None)
        return cycle is not None and not cycle.response_complete

    def close_idle(self, before: object) -> None:
        """Close the connection if no request has come since the last one, ``before``."""
        cycle = getattr(self, "cycle", None)
        if cycle is before and not self.is_answering:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEADER_SECONDS, self.close_idle, cycle)


def serve(watched: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C. ``say`` gets its address once it can be opened.

    Raises:
        RecordsError: the directory holds neither a run nor an experiment.
        WatchError: the port is in use.
    """
    token = "" if host in LOCAL else secrets.token_urlsafe(16)
    app = application(watched, token)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise WatchError(f"{host}:{port} cannot be listened at ({error.strerror}): give another --port, or 0") from None
    with listening:
        name = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
        if hasattr(os, "nice"):
            os.nice(YIELDING)
        say(f"http://{name}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else ""))
        # Browsers keep their event streams open: they are not waited for at the end.
        config = uvicorn.Config(
            app, log_level="critical", timeout_graceful_shutdown=1, server_header=False, http=Connection
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
