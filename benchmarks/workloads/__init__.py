"""What is measured: models with seeded weights, batches for them, and each model in plain PyTorch. Knows no systems."""
