"""Products with their bias and activation, activations alone, the head, the epilogue of a DCN-V2 layer."""
