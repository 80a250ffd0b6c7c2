"""Each model is one function from a feature schema and its hyper-parameters to an op graph. Nothing executable."""
