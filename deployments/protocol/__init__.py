"""The Open Inference Protocol v2, over REST and gRPC: requests, tensors, metadata. Knows no Ray."""
