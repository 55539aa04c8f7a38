"""An FSDP2, HSDP and DDP wrapping policy for any nn.Module: plan, explain, apply, verify."""
