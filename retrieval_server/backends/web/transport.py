"""One HTTP exchange with hard limits: total time, bytes after decompression, and the addresses it may connect to.

On httpcore and not on httpx for three reasons: httpx logs every address, which may hold a key; its timeouts are per
read, so a server that drips bytes is never cut off; and an address can only be checked where the connection is made,
since a name may resolve to something else a moment later.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx

from retrieval_server.errors import SettingsError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Sequence[str]]
"""(host, port) -> IP addresses; raises OSError when there are none."""

_MAX_CONNECTIONS = 100
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_DEADLINE: ContextVar[float] = ContextVar("deadline")
# What fails before anything was sent: the other side cannot have done, nor billed, anything.
_UNSENT = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout, httpcore.UnsupportedProtocol)


class TransferError(Exception):
    """No usable answer. The message says why and holds nothing of the request."""

    def __init__(self, message: str, sent: bool, again: bool = True) -> None:
        super().__init__(message)
        self.sent = sent
        """Whether the request may have reached the other side."""
        self.again = again
        """Whether another try may go better."""


class AddressRefusedError(TransferError):
    """The host is, or resolves to, an address that must not be contacted."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of any status."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Decompressed."""


def resolve(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public(address: IpAddress) -> bool:
    """True for an address of the public internet, also when it is wrapped in an IPv6 form that leads to IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(wrapped is not None and not is_public(wrapped) for wrapped in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


def anywhere(address: IpAddress) -> bool:
    """True: for addresses that the operator of the service configured."""
    return True


class Transport:
    """A pool of connections. Safe to use from several threads."""

    def __init__(
        self, allowed: Callable[[IpAddress], bool], resolver: Resolver = resolve, proxy_url: str | None = None
    ) -> None:
        """``allowed`` decides about every address before a connection is made to it (with a proxy: the proxy's)."""
        logging.getLogger("httpcore").setLevel(logging.INFO)  # its debug lines show headers, where a key may be echoed
        options: dict[str, Any] = {
            "ssl_context": httpx.create_ssl_context(),  # heeds SSL_CERT_FILE and SSL_CERT_DIR
            "max_connections": _MAX_CONNECTIONS,
            "keepalive_expiry": 5.0,  # short: a connection that the other side has closed costs a paid retry
            "network_backend": _GuardedBackend(allowed, resolver),
        }
        self._pool: httpcore.ConnectionPool
        if proxy_url is None:
            self._pool = httpcore.ConnectionPool(**options)
        else:
            proxy = httpx.Proxy(proxy_url)
            self._pool = httpcore.HTTPProxy(_raw(proxy.url), proxy_auth=proxy.raw_auth, **options)

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        max_bytes: int,
        accept: Callable[[int, Mapping[str, str]], str] = lambda status, headers: "",
    ) -> Reply:
        """Send a request and read the whole answer, within ``timeout_s`` in all; redirects are not followed.

        ``accept`` sees status and headers before the body is read, and returns why it should not be read, or "".
        Raises TransferError.
        """
        deadline = _DEADLINE.set(time.monotonic() + timeout_s)
        try:
            return self._exchange(method, url, headers, body, timeout_s, max_bytes, accept)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise TransferError(_describe(error, timeout_s), sent=not isinstance(error, _UNSENT)) from None
        except httpcore.ProxyError as error:
            raise TransferError(f"the proxy answers {str(error)[:80]}", sent=False) from None
        except httpcore.UnsupportedProtocol:
            raise TransferError("not an http address", sent=False, again=False) from None
        finally:
            _DEADLINE.reset(deadline)

    def _exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        max_bytes: int,
        accept: Callable[[int, Mapping[str, str]], str],
    ) -> Reply:
        limits = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        sent_headers: list[tuple[bytes | str, bytes | str]] = [("Accept-Encoding", "gzip, deflate"), *headers.items()]
        with self._pool.stream(
            method, _target(url), headers=sent_headers, content=body, extensions={"timeout": limits}
        ) as response:
            received = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if reason := accept(response.status, received):
                raise TransferError(reason, sent=True, again=False)
            chunks = _decoded(response.iter_stream(), received.get("content-encoding", "identity"), max_bytes)
            return Reply(response.status, received, b"".join(chunks))

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for an address (HTTPS_PROXY, HTTP_PROXY, NO_PROXY), or None.

    Raises SettingsError for one that cannot be used; its address is not shown, since it may hold a password.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "127.0.0.1", "::1") or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and urlsplit(proxy).scheme not in ("http", "https"):
        raise SettingsError(f"the environment names a proxy for {parts.scheme} that is none of http(s): unset it")
    return proxy


def _raw(url: httpx.URL) -> httpcore.URL:
    return httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)


def _target(url: str) -> httpcore.URL:
    try:
        return _raw(httpx.URL(url))
    except (httpx.InvalidURL, ValueError):
        raise TransferError("not an address", sent=False, again=False) from None


def _describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, httpcore.TimeoutException):
        return f"no complete answer within {timeout_s:g} s"
    if isinstance(error, httpcore.ProtocolError):  # its text quotes what was received, in which a key may be echoed
        return f"{type(error).__name__}: what arrives is no HTTP, or ends too early"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _decoded(chunks: Iterable[bytes], encoding: str, max_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed body; raises TransferError as soon as it is above the limit, whatever it expands to."""
    too_large = TransferError(f"the answer is larger than {max_bytes} bytes", sent=True, again=False)
    codings = [coding for coding in encoding.lower().replace(" ", "").split(",") if coding != "identity"]
    if codings not in ([], ["gzip"], ["x-gzip"], ["deflate"]):
        raise TransferError(f"the answer has the unknown encoding {encoding[:40]!r}", sent=True, again=False)
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32) if codings else None
    total = 0
    for chunk in chunks:
        try:
            data = chunk if inflate is None else inflate.decompress(chunk, max_bytes - total + 1)
        except zlib.error:
            raise TransferError("the answer is damaged (it cannot be decompressed)", sent=True) from None
        total += len(data)
        if total > max_bytes:
            raise too_large
        yield data
    if inflate is not None and total and not inflate.eof:
        raise TransferError("the answer is truncated (its compressed body has no end)", sent=True)


class _GuardedBackend(httpcore.NetworkBackend):
    """Connects to allowed addresses only, and hands out streams that end at the deadline of the exchange."""

    def __init__(self, allowed: Callable[[IpAddress], bool], resolver: Resolver) -> None:
        self._allowed, self._resolver = allowed, resolver
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = [ipaddress.ip_address(text.partition("%")[0]) for text in self._resolver(host, port)]
        except (OSError, ValueError) as error:
            raise httpcore.ConnectError(f"cannot resolve {host} ({type(error).__name__})") from None
        addresses = [address for address in found if self._allowed(address)]
        if not addresses:
            raise AddressRefusedError(f"{host} is not on the public internet", sent=False, again=False)
        for n_left in range(len(addresses), 1, -1):  # a dead one among several must not use up the time of all
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return self._connect(addresses[-n_left], port, _remaining(httpcore.ConnectTimeout) / n_left)
        return self._connect(addresses[-1], port, _remaining(httpcore.ConnectTimeout))

    def _connect(self, address: IpAddress, port: int, timeout: float) -> httpcore.NetworkStream:
        return _DeadlineStream(self._backend.connect_tcp(str(address), port, timeout))


class _DeadlineStream(httpcore.NetworkStream):
    """Every operation gets the time that is left, not a time of its own."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _remaining(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _remaining(httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        remaining = _remaining(httpcore.ConnectTimeout)
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, remaining))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _remaining(error: type[httpcore.TimeoutException]) -> float:
    left = _DEADLINE.get() - time.monotonic()
    if left <= 0:
        raise error
    return left
