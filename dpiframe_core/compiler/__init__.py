"""From a PyTorch module to the parts of a bundle: trace, tell lookups from products, write the graph. `dpiframe_core.compile`."""
