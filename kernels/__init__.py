"""Functions on tensors: CUDA and C with typed launchers, plain torch versions beside them. Knows no models and no requests."""
