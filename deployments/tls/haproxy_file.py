"""The configuration of the HAProxy that ends TLS."""

from pathlib import Path

from deployments.config_clients import Tls

_BLANK, _UNFIT = " ", "\"'\\#\n\r"


def haproxy_file(
    tls: Tls, folder: Path, certificate: Path, http_port: int, grpc_port: int | None, threads: int, stop_s: float
) -> str:
    """Its text.

    Args:
        folder: for the socket `control`, over which a successor asks for the port.
        certificate: a PEM file with the chain and its private key.
        http_port, grpc_port: of this host, where requests go on to.
        stop_s: after which a stop waits for no request any more.

    What a client is cut for is as with Serve's HAProxy behind it: 30 s without a byte of a request that it has begun, headers
    beyond 15 kB. How long an answer takes is the service's affair.
    """
    clients = "" if tls.client_ca is None else f" ca-file {_word(tls.client_ca)} verify required"
    to_grpc = "    use_backend grpc if { req.hdr(content-type) -m beg application/grpc }\n" if grpc_port is not None else ""
    lines = f"""
global
    maxconn 4096
    nbthread {threads}
    stats socket {_word(str(folder / "control"))} mode 600 level admin expose-fd listeners
    hard-stop-after {max(1, round(stop_s))}s
    ssl-default-bind-options ssl-min-ver TLSv1.2
    ssl-default-bind-ciphers ECDHE+AESGCM:ECDHE+CHACHA20
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout http-request 30s
    timeout http-keep-alive 75s
    timeout server 3600s
frontend tls
    bind {tls.host}:{tls.port} ssl crt {_word(str(certificate))} alpn h2,http/1.1{clients}
    http-request set-header X-Forwarded-Proto https
    http-request set-header X-Forwarded-For %[src]
{to_grpc}    default_backend http
backend http
    server service 127.0.0.1:{http_port}
"""
    if grpc_port is not None:
        lines += f"backend grpc\n    server service 127.0.0.1:{grpc_port} proto h2\n"
    return lines.lstrip()


def _word(path: str) -> str:
    """One word of HAProxy's, whatever the path holds."""
    return "".join(f"\\{c}" if c in _BLANK + _UNFIT else c for c in path)
