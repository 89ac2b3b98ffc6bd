"""The page of a directory or a swarm, served to a browser and kept up to date: an ASGI application and its server.

It is read-only, and answers GET and HEAD at four paths. If there is a token, requests need it. Otherwise the server is
bound to this machine, and the Host header must be a local name: a foreign page cannot read the answers.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ftis.config import FtisError
from ftis.records.following import Directory
from ftis.swarm.onlooker import Onlooker
from ftis.view.contents import Address, Link, OfSwarm, of_directory
from ftis.view.layout import asset
from ftis.view.live import Content, Shown, View

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Where a server is reached from this machine alone, so that its pages need no token."""

EVERY = 0.8
"""Seconds between two looks at the records."""

YIELDING = 10
"""By how much the server is nicer than what it watches: where cores are scarce, the run goes first."""

SIGN_OF_LIFE = 15.0
"""Seconds after which a browser hears something in any case, so that it notices a connection that is gone."""

MOST_VIEWS = 64
"""Pages that are kept; an address can be made up."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer. Styles may stand in attributes: what an arm's colour is, is no secret and runs nothing."""


class WatchError(FtisError):
    """The page cannot be served."""


def application(watched: Path | Onlooker, token: str = "") -> Starlette:
    """The ASGI application.

    Args:
        watched: a run's or an experiment's directory, or who looks on at a swarm.
        token: what ``?token=`` must be; "" for none, and then only requests to this machine's own names are answered.

    Raises:
        ReportError: the directory holds neither a run nor an experiment.
        WatchError: Starlette is not installed.
    """
    applications, concurrency, middleware, responses, routing = _starlette()
    content_of = _contents(watched)
    views: dict[Address, View] = {}

    def link(path: str, **query: Any) -> str:
        said = {name: value for name, value in query.items() if value is not None} | ({"token": token} if token else {})
        return f"/{path}" + (f"?{urlencode(said)}" if said else "")

    def view_of(request: Request) -> View:
        address, make = content_of(request.query_params.get("seed"), request.query_params.get("arm"))
        if address not in views and len(views) >= MOST_VIEWS:
            views.clear()
        return views.get(address) or views.setdefault(address, View(make(link)))

    def answered(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """An endpoint that wants the token."""

        async def endpoint(request: Request) -> Response:
            if token and not hmac.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
                text = "The address lacks the right token: take the one that ftis watch printed.\n"
                return _plain(responses, text, 403)
            return _made(await answer(request))

        return endpoint

    async def page(request: Request) -> Response:
        view = view_of(request)
        html = await concurrency.run_in_threadpool(view.document)
        return _made(responses.HTMLResponse(html, headers=HEADERS))

    async def events(request: Request) -> Response:
        view = view_of(request)
        stream = changes(lambda: concurrency.run_in_threadpool(view.look))
        return _made(responses.StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS))

    def file(name: str, media_type: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return _made(responses.Response(asset(name), media_type=media_type, headers=HEADERS))

        return answered(answer)

    app: Starlette = applications.Starlette(
        routes=[
            routing.Route("/", answered(page)),
            routing.Route("/events", answered(events)),
            routing.Route("/page.css", file("page.css", "text/css")),
            routing.Route("/watch.js", file("watch.js", "text/javascript")),
        ],
        exception_handlers={
            404: lambda request, error: _plain(responses, "There is nothing here.\n", 404),
            405: lambda request, error: _plain(responses, "This page can only be read.\n", 405),
        },
    )
    if not token:  # a page elsewhere whose name was made to lead here would be answered else
        app.add_middleware(middleware.TrustedHostMiddleware, allowed_hosts=[*LOCAL, "[::1]"], www_redirect=False)
    return app


def _contents(
    watched: Path | Onlooker,
) -> Callable[[str | None, str | None], tuple[Address, Callable[[Link], Content]]]:
    """Which page the seed and the arm in an address ask for, and what makes its content."""
    if isinstance(watched, Onlooker):
        return lambda seed, arm: (Address(), lambda link: OfSwarm(watched, link))
    directory = Directory(watched)

    def asked(seed: str | None, arm: str | None) -> tuple[Address, Callable[[Link], Content]]:
        known_seed = int(seed) if seed and seed.isdecimal() and int(seed) in directory.seeds else None
        address = Address(known_seed, arm if arm in {a.name for a in directory.arms} else None)
        return address, lambda link: of_directory(directory, address, link)

    return asked


def _plain(responses: Any, text: str, status: int) -> Response:
    return _made(responses.PlainTextResponse(text, status_code=status, headers=HEADERS))


def _made(response: Response) -> Response:
    """An answer whose class was imported where it is used."""
    return response


async def changes(look: Callable[[], Any]) -> AsyncIterator[str]:
    """What a browser is sent: the page as it stands, then of each change what is new. Ends when nobody listens."""
    import asyncio

    sent, quiet = Shown(0, "", "", {}), 0.0
    yield "retry: 1000\n\n"
    while True:
        shown: Shown = await look()
        if shown.number != sent.number:
            yield f"data: {json.dumps(_difference(sent, shown))}\n\n"
            sent, quiet = shown, 0.0
        elif quiet >= SIGN_OF_LIFE:
            yield ": still here\n\n"
            quiet = 0.0
        await asyncio.sleep(EVERY)
        quiet += EVERY


def _difference(before: Shown, now: Shown) -> dict[str, Any]:
    """Title, header and order of the sections, and those that differ."""
    differing = {anchor: html for anchor, html in now.sections.items() if before.sections.get(anchor) != html}
    return {"title": now.title, "header": now.header, "order": list(now.sections), "sections": differing}


def serve(watched: Path | Onlooker, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C. ``say`` gets its address once it can be opened.

    Raises:
        ReportError: the directory holds neither a run nor an experiment.
        WatchError: the port is in use, or a package is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise _not_installed("uvicorn") from None
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
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, server_header=False)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


def _starlette() -> tuple[Any, ...]:
    try:
        from starlette import applications, concurrency, responses, routing
        from starlette.middleware import trustedhost
    except ImportError:
        raise _not_installed("starlette") from None
    return applications, concurrency, trustedhost, responses, routing


def _not_installed(package: str) -> WatchError:
    return WatchError(f"ftis watch needs {package}, which is not installed: pip install '.[watch]' in ftis's clone")
