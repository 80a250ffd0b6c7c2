"""RecBole's context-aware models: a checkpoint's parameters and what its data set made of tokens, as a source model."""
