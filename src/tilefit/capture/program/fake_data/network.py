"""Downloads: there are none."""

from __future__ import annotations

import io
import socket
from types import ModuleType
from typing import Any

from tilefit.capture.program.fake_data import made
from tilefit.capture.program.fake_data.sources import NO_DOWNLOAD, PUT_IT_THERE, Sources
from tilefit.capture.program.late import Change

_LOCAL = ("127.", "localhost", "::1", "0.0.0.0")  # process groups of one


def changes(sources: Sources) -> dict[str, Change]:
    """Refuses connections, and answers what a program fetches itself."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> Any:
        host = address[0] if isinstance(address, tuple) else ""
        if self.family == socket.AF_UNIX or (isinstance(host, str) and host.startswith(_LOCAL)):
            return connect(self, address)
        raise ConnectionRefusedError(f"{NO_DOWNLOAD} {host}")

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host and not str(host).startswith(_LOCAL) and str(host) != socket.gethostname():
            raise socket.gaierror(socket.EAI_NONAME, f"{NO_DOWNLOAD} {host}")
        return look_up(host, *args, **kwargs)

    look_up = socket.getaddrinfo
    sources.replace(socket.socket, "connect", refuse)
    sources.replace(socket, "getaddrinfo", resolve)
    return {
        "urllib.request": lambda module: sources.answer(
            module.OpenerDirector,
            "open",
            lambda opener, url, *args, **kwargs: _address(url),
            lambda opener, url, *args, **kwargs: Response(sources, _address(url)),
        ),
        "requests.sessions": lambda module: sources.answer(
            module.Session,
            "request",
            lambda session, method, url, *args, **kwargs: url,
            lambda session, method, url, *args, **kwargs: Response(sources, url),
        ),
    }


def _address(url: Any) -> str:
    return str(getattr(url, "full_url", url))


class Response(io.BytesIO):
    """What an address answers: as :mod:`urllib` and as ``requests`` show it."""

    status = code = status_code = 200
    ok = True
    reason = "OK"

    def __init__(self, sources: Sources, url: str) -> None:
        self._made = made.content(url)
        if self._made is None:
            sources.note(url, PUT_IT_THERE)
            raise ConnectionRefusedError(f"{NO_DOWNLOAD} {url}")
        sources.state(url, self._made[1])
        self.url, self.content = url, self._made[0]
        self.headers = {"Content-Length": str(len(self.content)), "content-length": str(len(self.content))}
        super().__init__(self.content)

    @property
    def raw(self) -> Response:
        """Itself."""
        return self

    @property
    def text(self) -> str:
        """Decoded."""
        return self.content.decode()

    def info(self) -> dict[str, str]:
        """The headers."""
        return self.headers

    def iter_content(self, chunk_size: int = 1 << 16, **kwargs: Any) -> Any:
        """Piece by piece."""
        return iter(lambda: self.read(chunk_size), b"")

    def raise_for_status(self) -> None:
        """All is well."""


def requests_of(sources: Sources) -> ModuleType:
    """A stand-in for the library ``requests``, where it is not installed."""
    module = ModuleType("requests")
    for name in ("get", "post", "request"):
        setattr(module, name, lambda *args, **kwargs: Response(sources, str(args[-1])))
    module.exceptions = module  # type: ignore[attr-defined]
    module.RequestException = module.ConnectionError = ConnectionError  # type: ignore[attr-defined]
    return module
