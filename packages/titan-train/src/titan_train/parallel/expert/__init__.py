"""Expert parallelism: each rank holds some of every layer's experts, and tokens travel to them, none dropped."""
