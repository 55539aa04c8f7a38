"""float8 training for any PyTorch model: casts, products, layers and a converter."""
