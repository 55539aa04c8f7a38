"""Context parallelism for any attention, exact on CPU and GPU."""
