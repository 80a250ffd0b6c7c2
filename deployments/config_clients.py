"""What a deployment says of its clients: where they connect, and who may ask."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpiframe_core.strict import Strict


class Tls(Strict):
    """Where clients connect by TLS, HTTP and gRPC alike. `dpiframe serve` ends it there (docs/security.md).

    `certificate`: a PEM file with the server's certificate and those that sign it; `key`: of its private key, if that is a
    file of its own. `client_ca`: whose certificate clients must show, if they are to. They are followed as they change.
    """

    host: Literal["127.0.0.1", "0.0.0.0"] = "0.0.0.0"
    port: Annotated[int, Field(ge=1, le=65535)] = 8443
    certificate: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)] | None = None
    client_ca: Annotated[str, Field(min_length=1)] | None = None


class Http(Strict):
    """Where clients connect. HAProxy reaches the replicas of its own host over loopback, hence just these two hosts.

    `direct_port`: where the replicas of a host are reached besides, without HAProxy (docs/direct-port.md); none by default.
    `direct_socket`: the path of a Unix socket where they are reached so by processes of their host, of the same user and of
    `direct_socket_group`; none by default.
    `tls`: a port that speaks TLS, beside the plain ones.
    """

    host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    direct_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    direct_socket: Annotated[str, Field(pattern=r"^/[!-~]{1,106}$")] | None = None  # a longer one has no room in an address
    direct_socket_group: Annotated[str, Field(min_length=1)] | None = None
    tls: Tls | None = None

    @model_validator(mode="after")
    def _groups_are_of_sockets(self) -> Self:
        if self.direct_socket_group is not None and self.direct_socket is None:
            raise ValueError(f"direct_socket_group: got {self.direct_socket_group!r} without direct_socket, expected both")
        return self


class Grpc(Strict):
    """Where gRPC clients connect, on the host of `Http`. Replicas then listen on every interface too (docs/protocol.md)."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8001


class Access(Strict):
    """Who may ask: those with a token of the file `tokens`, whose lines `dpiframe token` makes; or, with `open`, anybody."""

    tokens: Annotated[str, Field(min_length=1)] | None = None
    open: bool = False

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if (self.tokens is None) != self.open:
            got = "both it and" if self.open else "neither it nor"
            raise ValueError(f"tokens: got {got} open: true, expected one of the two")
        return self
