"""The service: HTTP and gRPC, batching, fan-in, Ray Serve, the client and the `dpiframe` command.

Modules beside the rooms are names that others import (`app`, `front`, `infer_grpc`) or that every room may read.
"""
