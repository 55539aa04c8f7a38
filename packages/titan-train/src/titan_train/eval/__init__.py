"""How good a trained model is: perplexity, bits per byte, and the tasks of lm-evaluation-harness.

- `model`: a run or an exported folder as something that scores and continues tokens.
- `perplexity`: log-likelihoods of continuations, in batches, and of whole texts.
- `harness`: the model that lm-evaluation-harness calls; imported only where it is installed.
- `ranks`: texts and requests shared by ranks.
"""
