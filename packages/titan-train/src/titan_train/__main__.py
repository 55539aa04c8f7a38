"""`python -m titan_train` is the command `titan-train`; torchrun wants the module form."""

from titan_train.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
