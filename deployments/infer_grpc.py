"""The name by which Serve imports our gRPC service: `grpc_servicer_functions: [deployments.infer_grpc.add_to_server]`."""

from deployments.protocol.grpc_service import add_to_server

__all__ = ["add_to_server"]
