"""Starting ranks: our own on this machine, or as a plain worker under torchrun."""
