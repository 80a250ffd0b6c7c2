"""What a deployment says of where its clients connect."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpiframe_core.strict import Strict


class Http(Strict):
    """Where clients connect. HAProxy reaches the replicas of its own host over loopback, hence just these two hosts.

    `direct_port`: where the replicas of a host are reached besides, without HAProxy (docs/direct-port.md); none by default.
    `direct_socket`: the path of a Unix socket where they are reached so by processes of their host, of the same user and of
    `direct_socket_group`; none by default.
    """

    host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    direct_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    direct_socket: Annotated[str, Field(pattern=r"^/[!-~]{1,106}$")] | None = None  # a longer one has no room in an address
    direct_socket_group: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _groups_are_of_sockets(self) -> Self:
        if self.direct_socket_group is not None and self.direct_socket is None:
            raise ValueError(f"direct_socket_group: got {self.direct_socket_group!r} without direct_socket, expected both")
        return self


class Grpc(Strict):
    """Where gRPC clients connect, on the host of `Http`. Replicas then listen on every interface too (docs/protocol.md)."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8001
