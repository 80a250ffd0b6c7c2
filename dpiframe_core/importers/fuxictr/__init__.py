"""A FuxiCTR training run, as it lies on disk, into a `SourceModel`. FuxiCTR itself is not needed."""
