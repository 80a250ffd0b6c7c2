"""What a deployment says of where its clients connect."""

from typing import Annotated, Literal

from pydantic import Field

from dpiframe_core.strict import Strict


class Http(Strict):
    """Where clients connect. HAProxy reaches the replicas of its own host over loopback, hence just these two hosts.

    `direct_port`: where the replicas of a host are reached besides, without HAProxy (docs/direct-port.md); none by default.
    """

    host: Literal["127.0.0.1", "0.0.0.0"] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    direct_port: Annotated[int, Field(ge=1, le=65535)] | None = None


class Grpc(Strict):
    """Where gRPC clients connect, on the host of `Http`. Replicas then listen on every interface too (docs/protocol.md)."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8001
