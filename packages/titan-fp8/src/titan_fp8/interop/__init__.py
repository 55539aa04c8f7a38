"""Other packages' entry points, for frameworks that call those."""
