"""A model to try DPIFrame with, made from nothing in half a minute: a synthetic click log in Criteo's file format, a DeepFM
trained on it in plain PyTorch, and the bundle that serves it.

It stands in for a team's own training code and uses DPIFrame as they would: `click_logs` to read, `Encoder` to encode,
`write_bundle` to export.
"""
