"""TLS at a port of its own, before the ports that clients reach in plain HTTP and gRPC."""
