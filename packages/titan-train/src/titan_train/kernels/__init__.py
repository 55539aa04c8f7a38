"""Elementwise kernels to choose from, each beside the plain form that it must equal.

- `registry`: which kernels there are for an operation, what each needs, and which of them runs.
- `forms`: the operations in plain torch, and titan-fp8's and liger-kernel's versions of them.
- `apply`: puts a choice into a model.
- `measure`: what each costs on this machine; `titan-train doctor --bench` writes the fastest.

They are for eager mode: `torch.compile` makes its own from the plain forms.
"""
