"""From a PyTorch module to the parts of a bundle: traces it, tells lookups from products, writes the graph."""
