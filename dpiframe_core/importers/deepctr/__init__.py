"""DeepCTR-Torch's models, from a checkpoint or alive, as a source model. The library is needed for live ones only."""
